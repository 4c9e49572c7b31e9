"""flywheel report

One self-contained HTML page (no script, no link, pictures inside) about a drafter: acceptance with
intervals, by position and slice, where rounds end, the comparison with the champion, K, examples of
the worst contexts, what was tested and what not. `flywheel evaluate` writes it; `preflight` and
`verify` add what they found and write it again. Each time it is also attached to the drafter's
MLflow run.
"""

from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.reporting.facts import newest_evaluated
from jobs.reporting.page import publish


def run(cfg: Config) -> dict[str, Any]:
    """Write the page of the drafter that was evaluated last.

    Raises ValueError if none was evaluated, and for a dataset or an evaluation that cannot be read.
    """
    page = publish(cfg, newest_evaluated(cfg))
    console.print(f"report: {page}")
    return {"stage": "report", "report": page}


if __name__ == "__main__":
    run_as_module("report")
