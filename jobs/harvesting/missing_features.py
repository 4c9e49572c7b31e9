"""Harvest what has no features yet: the work of `flywheel harvest`, and of regression sets."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dflash.identity import target_id
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.target_facts import target_config, target_taps
from jobs.dataset.samples import features_folder, none_of_target
from jobs.harvesting.actors import harvest_rows
from jobs.harvesting.harvester import Row, engine
from jobs.harvesting.screening import REASONS, TOO_LONG, is_settled, too_many
from store.features import open_shard
from store.files import sweep
from store.rates import exceeds
from store.schemas import features_columns
from store.set_aside import read_set_aside, write_set_aside
from store.shard_repair import mend, publish, remember
from store.shards import read_dataset, shard_info
from store.traffic_table import read_traffic

COLUMNS = ["sample_id", "domain", "prompt_ids", "output_ids", "temperature", "shaped"]
SHOWN_DAMAGED = 10


@dataclass(frozen=True)
class Outcome:
    """The result of a harvest: its numbers, and the SET_ASIDE rows of the `samples` in traffic/."""

    summary: Row
    aside: list[Row]
    samples: int

    def check_rate(self, limit: float) -> None:
        """Raise ValueError if the share set aside is significantly above `limit` (store.rates)."""
        # A sample that is too long for the engine is not the sample's fault.
        failed = [r for r in self.aside if r["reason"] != TOO_LONG]
        if exceeds(len(failed), self.samples, limit):
            raise ValueError(too_many(failed, self.samples, limit))


def harvest_missing(cfg: Config) -> Outcome:
    """Harvest every sample of traffic/ that has no features; what fails a check is set aside.

    Raises ValueError without traffic.
    """
    identity = target_id(cfg.target_path)
    folder = features_folder(cfg, identity)
    sweep(folder)
    traffic = read_traffic(cfg.path("traffic"), identity).select(COLUMNS)
    if traffic.num_rows == 0:
        raise none_of_target(cfg, "sample", "run `flywheel ingest` first")
    done = published(cfg, identity, folder)
    known = read_set_aside(cfg.path("set_aside"), folder.name)
    mine = traffic["sample_id"].to_pylist()
    present = engine(cfg) if known else {}
    settled = [name for name, row in known.items() if is_settled(row, present)]
    skip = pa.array([*done, *settled], pa.string())
    tried = traffic.filter(~pc.field("sample_id").isin(skip))
    found = harvest_rows(cfg, tried, folder)
    shards = [shard_info(path) for path in sorted(found.paths)]
    if shards:
        publish(folder, shards, {"samples": found.samples, "target_id": identity})
        remember(folder)
    failed = {row["sample_id"] for row in found.aside}
    fit = done | {*tried["sample_id"].to_pylist()} - failed
    write_set_aside(cfg.path("set_aside"), folder.name, found.aside, fit)
    known = read_set_aside(cfg.path("set_aside"), folder.name)
    aside = [known[name] for name in mine if name in known]
    summary: Row = {
        "backend": cfg.harvest.backend,
        "folder": str(folder),
        "samples": found.samples,
        "reused": len(done.intersection(mine)),
        "tokens": sum(s.tokens for s in shards),
        "bytes": sum(s.bytes for s in shards),
        "set_aside": dict(Counter(row["reason"] for row in aside)),
    }
    return Outcome(summary, aside, len(mine))


def published(cfg: Config, identity: str, folder: Path) -> set[str]:
    """Ids of the samples with features. First it removes damaged features, with a message, and
    publishes the finished shards of an interrupted harvest.
    """
    shape = (identity, list(target_taps(cfg)), target_config(cfg)["hidden_size"])
    mended = mend(folder, lambda path: open_shard(path, *shape, cfg.harvest.top_k))
    for name, fault in sorted(mended.damaged.items())[:SHOWN_DAMAGED]:
        console.print(f"features of sample {name}: {fault}; harvested again", markup=False)
    if mended.damaged or mended.lost:
        console.print(
            f"damaged features: {len(mended.damaged)} samples and {len(mended.lost)} whole files "
            f"of {folder}; harvested again",
            markup=False,
        )
    columns = features_columns(cfg.harvest.top_k)
    return set(read_dataset(folder, columns, columns=["sample_id"])["sample_id"].to_pylist())


def show(done: Outcome) -> None:
    """Print what was made, and what was set aside with an example of each reason."""
    summary, aside = done.summary, done.aside
    names = ["samples", "reused", "tokens", "bytes"]
    columns = [*names, "set aside"]
    print_table("Features", columns, [[*(summary[name] for name in names), len(aside)]])
    if aside:
        examples = {row["reason"]: row for row in reversed(aside)}
        rows = [
            [reason, count, REASONS[reason][0], examples[reason]["sample_id"]]
            for reason, count in sorted(summary["set_aside"].items())
        ]
        print_table("Set aside", ["reason", "samples", "what was found", "for instance"], rows)
