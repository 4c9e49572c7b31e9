"""flywheel report

One self-contained HTML page (no script, no link, pictures inside) about a drafter: acceptance with
intervals, by position and slice, where rounds end, the comparison with the champion, K, examples of
the worst contexts, what was tested and what not. `flywheel evaluate` writes it, `preflight` and
`verify` write it again with what they found; each time it goes to the drafter's MLflow run, too.
"""

from jobs.report.page import publish, run

__all__ = ["publish", "run"]
