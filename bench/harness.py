"""What every benchmark shares: interleaved timing and the one JSON line."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def paired(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of theirs / ours for each repeat, in A B B A order. Each first runs unmeasured."""
    ours()
    theirs()
    ratios = []
    for i in range(repeats):
        first, second = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        a, b = seconds(first), seconds(second)
        ratios.append(b / a if i % 2 == 0 else a / b)
    return ratios


def cpu_name() -> str:
    """What the operating system calls this CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def report(name: str, ratios: list[float], unit: str, detail: dict[str, Any]) -> None:
    """Print the JSON line of bench/README.md."""
    line = {
        "name": name,
        "ratio": round(statistics.median(ratios), 3),
        "unit": unit,
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "detail": detail | {"repeats": len(ratios)},
    }
    print(json.dumps(line))
