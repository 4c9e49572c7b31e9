"""flywheel select [--plan] [select.days=30] [select.domains=tickets=2000000,*=500000]

Pins what is learned from: <work>/traffic -> <work>/selection, a small table of sample ids.
Harvest, training and evaluation read the selection and nothing else, so what they cost follows the
budgets of this stage, whatever the traffic is. The newest samples of each domain are taken, within
budgets of tokens and caps per tenant and per repeated prompt. With --plan it says what would be
taken, and why the rest would not, and writes nothing.
"""

from typing import Any

import pyarrow as pa

from dflash.identity import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, short_name
from jobs.dataset.samples import none_of_target
from jobs.dataset.slices import largest_rows
from jobs.selection.ranking import REASONS, Ranking, rank
from jobs.selection.sides import choose, earlier_sides
from store.lease import lease

SIDES = ("train", "val", "test")


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would take, by domain and reason; writes nothing."""
    ranking = _ranking(cfg, target_id(cfg.target_path), _versions(cfg))
    show_reasons(ranking.counts)
    return {"stage": "select", "plan": _by_domain(ranking.counts), "budgets": ranking.budgets}


def run(cfg: Config) -> dict[str, Any]:
    """Select anew; returns the summary with the version of selection/ that holds the result.

    The same traffic and settings give the same version again. Raises ValueError without traffic of
    this target.
    """
    identity = target_id(cfg.target_path)
    with lease(cfg.place("leases", "select")) as held:
        table, versions = cfg.table("selection").under(held.check), _versions(cfg)
        ranking = _ranking(cfg, identity, versions)
        earlier = earlier_sides(cfg, identity)
        rows, moved, off_policy = choose(cfg, identity, ranking.taken, earlier, versions["traffic"])
        note = {"versions": versions, "target_id": identity, "budgets": ranking.budgets}
        version = table.replace("target_id", [identity], [table.write(rows)], note)
    show_reasons(ranking.counts)
    domains = show_samples(rows)
    if off_policy:
        console.print(
            f"note: {off_policy} held-out samples were made from text: they are left out, because "
            "a drafter is judged on what the target wrote"
        )
    if moved:
        console.print(
            f"note: {moved} samples stay on the side that an earlier selection gave them, because "
            "a drafter may have learned from their group"
        )
    return {
        "stage": "select",
        "target_id": identity,
        "version": version,
        "samples": rows.num_rows,
        "tokens": _tokens(rows),
        "domains": domains,
        "left_out": _left_out(ranking.counts) | ({"off_policy": off_policy} if off_policy else {}),
        "from_versions": versions,
    }


def _versions(cfg: Config) -> dict[str, int | None]:
    return {name: cfg.table(name).version() for name in ("traffic", "acceptance", "logs")}


def _ranking(cfg: Config, identity: str, versions: dict[str, int | None]) -> Ranking:
    ranking = rank(cfg, identity, versions)
    if not ranking.counts.num_rows:
        raise none_of_target(cfg, "sample", "run `flywheel ingest` first")
    return ranking


def show_reasons(counts: pa.Table) -> None:
    """Print how many samples and tokens were taken or left out, by domain and reason."""
    found = {}
    for row in counts.to_pylist():
        name = row["domain"], row["reason"]
        known = found.setdefault(name, [0, 0])
        known[0] += row["samples"]
        known[1] += row["tokens"]
    order = list(REASONS)
    rows = [
        [short_name(domain), reason or "taken", *found[domain, reason], REASONS[reason]]
        for domain, reason in sorted(found, key=lambda key: (key[0], order.index(key[1])))
    ]
    print_table("Selection", ["domain", "reason", "samples", "tokens", "meaning"], rows)


def show_samples(rows: pa.Table) -> dict[str, dict[str, int]]:
    """Print selected samples by domain and split; returns {domain: {split: samples}}."""
    counts = rows.group_by(["domain", "split"]).aggregate([("sample_id", "count")]).to_pylist()
    domains: dict[str, dict[str, int]] = {}
    for row in sorted(counts, key=lambda row: row["domain"]):
        known = domains.setdefault(row["domain"], dict.fromkeys(SIDES, 0))
        known[row["split"]] = row["sample_id_count"]
    table = largest_rows({name: list(splits.values()) for name, splits in domains.items()})
    print_table("Samples in selection/", ["domain", *SIDES], table)
    return domains


def _by_domain(counts: pa.Table) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = {}
    for row in counts.to_pylist():
        of_domain = found.setdefault(row["domain"], {})
        known = of_domain.setdefault(row["reason"] or "taken", {"samples": 0, "tokens": 0})
        known["samples"] += row["samples"]
        known["tokens"] += row["tokens"]
    return found


def _left_out(counts: pa.Table) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in counts.to_pylist():
        if row["reason"]:
            found[row["reason"]] = found.get(row["reason"], 0) + row["samples"]
    return found


def _tokens(rows: pa.Table) -> int:
    return sum(sum(rows[name].to_pylist()) for name in ("prompt_tokens", "output_tokens"))


if __name__ == "__main__":
    run_as_module("select")
