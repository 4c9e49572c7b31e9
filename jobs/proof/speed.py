"""Which requests speed is measured on, and whether the machine was quiet."""

from jobs.base.config import Config
from jobs.base.console import console, some_names
from jobs.dataset.samples import none_of_target
from jobs.dataset.slices import Row, domains
from serving.client import Request

UNSTEADY = 1.3
"""If the fastest plain pass is faster than the slowest by more, the machine was not quiet."""


def speed_loads(cfg: Config, narrow: list[Request]) -> dict[int, list[Request]]:
    """{concurrency: requests}: the first verify.requests at 8, a quarter as many at 1."""
    return {1: narrow[: (cfg.verify.requests + 3) // 4], 8: narrow[: cfg.verify.requests]}


def speed_domain(cfg: Config, rows: list[Row]) -> str:
    """verify.domain, else the domain with the most held-out samples. ValueError if it has none."""
    names = domains(rows)
    if not names:
        what = f"greedy {cfg.evaluate.split} sample of more than one token"
        fix = "send some requests with temperature 0, or set evaluate.split"
        raise none_of_target(cfg, what, fix)
    if not cfg.verify.domain:
        return max(names, key=[row["domain"] for row in rows].count)
    if cfg.verify.domain not in names:
        raise ValueError(
            f"no held-out sample of domain {cfg.verify.domain!r} (verify.domain): "
            f"there are {some_names(names)}"
        )
    return cfg.verify.domain


def warn_if_unsteady(stage: str, speeds: list[Row]) -> None:
    """Print a warning if the passes of the plain server differ too much for ratios to mean much."""
    for s in speeds:
        if max(s["plain"]) > UNSTEADY * min(s["plain"]):
            console.print(
                f"at concurrency {s['concurrency']} the plain server gave "
                f"{min(s['plain']):.0f} to {max(s['plain']):.0f} tokens/s: the machine was busy "
                f"with something else, so these ratios mean little; run `flywheel {stage}` again",
                style="yellow",
            )
