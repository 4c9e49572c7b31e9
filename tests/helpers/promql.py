"""What the queries of the board and of the alert rules ask for, and what a replica serves."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

INFRA = Path(__file__).parents[2] / "infra"
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""
COUNTING = ("rate", "increase")


@dataclass(frozen=True)
class Asked:
    """One metric in a query, the labels that are chosen or grouped by, and the values chosen."""

    metric: str
    labels: frozenset[str]
    values: frozenset[tuple[str, str]]
    is_rate: bool


def queries() -> dict[str, str]:
    """Every query by where it stands, with Grafana's variables replaced."""
    rules = yaml.safe_load((INFRA / "prometheus/rules.yaml").read_text())["groups"]
    found = {rule["alert"]: rule["expr"] for group in rules for rule in group["rules"]}
    board = json.loads((INFRA / "grafana/flywheel.json").read_text())
    for panel in board["panels"]:
        found |= {f"panel {panel['id']}{t['refId']}": t["expr"] for t in panel.get("targets", [])}
    found |= {f"annotation {one['name']}": one["expr"] for one in board["annotations"]["list"]}
    return {name: expr.replace("$__rate_interval", "5m") for name, expr in found.items()}


def asked(query: str) -> list[Asked]:
    """The metrics of a query. Raises ValueError for what is no PromQL."""
    return list(_walk(promql_parser.parse(query), frozenset(), False))


def _walk(node: Any, grouped: frozenset[str], is_rate: bool) -> Iterator[Asked]:
    if isinstance(node, promql_parser.VectorSelector):
        chosen = [m for m in node.matchers.matchers if "$" not in m.value]
        values = {(m.name, value) for m in chosen for value in m.value.split("|")}
        labels = grouped | {m.name for m in node.matchers.matchers}
        yield Asked(str(node.name), frozenset(labels), frozenset(values), is_rate)
        return
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        grouped = grouped | set(node.modifier.labels)
    if isinstance(node, promql_parser.Call):
        is_rate = is_rate or node.func.name in COUNTING
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for child in [*children, *getattr(node, "args", [])]:
        if child is not None:
            yield from _walk(child, grouped, is_rate)


@dataclass
class Series:
    """What a server says of one metric."""

    kind: str
    labels: set[str]
    values: set[tuple[str, str]]


def served(metrics: str) -> dict[str, Series]:
    """The text of /metrics by name of the series (with _total, _bucket ...)."""
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            one = found.setdefault(sample.name, Series(family.type, set(), set()))
            one.labels |= set(sample.labels)
            one.values |= set(sample.labels.items())
    return found


def missing(metrics: str) -> set[str]:
    """Metrics of the board and the rules that a server does not serve."""
    names = {one.metric for query in queries().values() for one in asked(query)}
    return names - set(served(metrics)) - {"up"}
