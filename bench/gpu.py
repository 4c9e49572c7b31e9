"""python -m bench.gpu [SECTION ...]: what one GPU computes and how fast, within eight minutes.

It needs torch (2.11 or newer), safetensors, transformers and this checkout; no vLLM, Ray, network
or data. Features come from a small random target that is made on the spot. Each section of
bench/gpu_sections.py runs in its own process with its own limit of time. So a section that fails,
hangs or breaks the GPU's context costs only itself. The last line of stdout is one JSON line: the
machine, and for each section its findings and seconds, or `failed` with the end of its error.
`--tiny` runs shapes that a CPU can compute.
"""

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu_sections import SECTIONS
from bench.gpu_worlds import TINY, full

ROOT = Path(__file__).parents[1]
LINES_OF_ERROR = 12


def main(args: list[str]) -> None:
    """Run the named sections (default: all) and print the JSON line."""
    tiny, names = "--tiny" in args, [arg for arg in args if arg != "--tiny"]
    unknown = sorted(set(names) - SECTIONS.keys())
    if unknown:
        raise SystemExit(f"no section {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    if not tiny and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU: run it on one, or with --tiny for shapes of a CPU")
    started, found = time.perf_counter(), {}
    for name in names or SECTIONS:
        code = f"from bench.gpu import one; one({name!r}, {tiny})"
        found[name] = run([sys.executable, "-c", code], SECTIONS[name].limit)
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    line = {"name": "gpu", "machine": machine(), "sections": found}
    print(json.dumps(line | {"seconds": round(time.perf_counter() - started, 1)}))


def one(name: str, tiny: bool) -> None:
    """One section, in the process of its own: prints its findings as JSON."""
    print(json.dumps(SECTIONS[name].run(TINY if tiny else full())))


def run(command: list[str], limit: float) -> dict[str, Any]:
    """The JSON line that a command prints last, with its seconds; or why there is none."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:g} s"}
    spent = {"seconds": round(time.perf_counter() - started, 1)}
    if done.returncode:
        error = "\n".join(done.stderr.strip().splitlines()[-LINES_OF_ERROR:])
        return spent | {"failed": error or f"ended with code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1]) | spent


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    about = {"python": platform.python_version(), "torch": torch.__version__}
    if not torch.cuda.is_available():
        return about | {"device": "cpu"}
    gpu = torch.cuda.get_device_properties(0)
    return about | {
        "device": gpu.name,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "capability": f"{gpu.major}.{gpu.minor}",
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
