"""Harvest what has no features yet: the work of `flywheel harvest`, and of regression sets."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from dflash.identity import target_id
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.target_facts import target_config, target_taps
from jobs.dataset.samples import features_place, selected, with_tokens
from jobs.harvesting import actors
from jobs.harvesting.harvester import Row, engine
from jobs.harvesting.screening import REASONS, TOO_LONG, is_settled, too_many
from store.feature_codec import DTYPES
from store.feature_index import index_of
from store.lease import Lease, lease
from store.place import Place
from store.rates import exceeds
from store.schemas import features_schema
from store.set_aside import read_set_aside, write_set_aside
from store.shard_repair import mend

SAMPLE = ["sample_id", "domain", "temperature", "shaped"]
CHUNK = [*SAMPLE, "prompt_ids", "output_ids"]
"""Columns of the samples that an actor gets."""
SHOWN_DAMAGED = 10
COMMIT_SECONDS = 1.0
"""Shards that are finished within this time are listed by one commit."""
Tokens = Callable[[pa.Table], Iterable[pa.RecordBatch]]
"""Of rows with SAMPLE: their sample_id, prompt_ids and output_ids, in any order."""


@dataclass(frozen=True)
class Outcome:
    """The result of a harvest: its numbers, the SET_ASIDE rows of the samples that it was about,
    and how many `samples` those are.
    """

    summary: Row
    aside: list[Row]
    samples: int

    def check_rate(self, limit: float) -> None:
        """Raise ValueError if the share set aside is significantly above `limit` (store.rates)."""
        # A sample that is too long for the engine is not the sample's fault.
        failed = [r for r in self.aside if r["reason"] != TOO_LONG]
        if exceeds(len(failed), self.samples, limit):
            raise ValueError(too_many(failed, self.samples, limit))


@dataclass
class Made:
    """What this harvest has made: counts, and SET_ASIDE rows."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    aside: list[Row] = field(default_factory=list)


def harvest_missing(cfg: Config) -> Outcome:
    """Harvest every selected sample that has no features; what fails a check is set aside.

    Raises ValueError without a selection.
    """
    return harvest_samples(cfg, selected(cfg), partial(with_tokens, cfg))


def harvest_samples(cfg: Config, samples: pa.Table, tokens: Tokens) -> Outcome:
    """Harvest those of `samples` (SAMPLE; each once) that have no features.

    One harvest of a cache runs at a time, on all hosts. Raises ValueError if another one does not
    end, and if `tokens` lacks samples; the features of the others are listed first.
    """
    place = features_place(cfg)
    with lease(cfg.place("leases", f"harvest-{place.name}")) as held:
        repair(cfg, place, held)
        index, set_aside = (cfg.table(t).under(held.check) for t in ("feature_index", "set_aside"))
        done = index_of(index, place.name, samples["sample_id"].combine_chunks())["sample_id"]
        known = read_set_aside(set_aside, place.name)
        present = engine(cfg) if known else {}
        settled = pa.array([n for n, row in known.items() if is_settled(row, present)], pa.string())
        skip = pa.chunked_array([*done.chunks, settled], pa.string()).combine_chunks()
        tried = samples.filter(~pc.field("sample_id").isin(skip))
        made = _harvest(cfg, place, tried, tokens(tried), held)
        fit = index_of(index, place.name, known)["sample_id"].to_pylist()
        write_set_aside(set_aside, place.name, made.aside, set(fit))
    if lost := tried.num_rows - made.samples - len(made.aside):
        raise ValueError(
            f"{lost} of {samples.num_rows} samples are not in traffic/ any more: run `flywheel "
            "select` again"
        )
    known = read_set_aside(set_aside, place.name)
    mine = samples.filter(pc.field("sample_id").isin(pa.array(known, pa.string())))
    aside = [known[name] for name in mine["sample_id"].to_pylist()]
    summary: Row = {
        "backend": cfg.harvest.backend,
        "folder": str(place),
        "samples": made.samples,
        "reused": len(done),
        "tokens": made.tokens,
        "bytes": made.bytes,
        "set_aside": dict(Counter(row["reason"] for row in aside)),
    }
    return Outcome(summary, aside, samples.num_rows)


def _harvest(
    cfg: Config, place: Place, tried: pa.Table, tokens: Iterable[pa.RecordBatch], held: Lease
) -> Made:
    """Harvest these samples shard by shard and list the shards, with a progress bar."""
    made, waiting, last = Made(), list[pa.Table](), time.monotonic()
    size = cfg.harvest.samples_per_shard
    num_chunks = -(-tried.num_rows // size)
    chunks = chunks_of(tried, tokens, size)
    with tqdm(total=len(tried), desc="harvest", unit="sample", disable=not num_chunks) as bar:
        for done in actors.by_actors(cfg, place, chunks, num_chunks) if num_chunks else ():
            waiting.append(done.index)
            made.aside += done.aside
            made.samples += len(done.index)
            made.tokens += pc.sum(done.index["n_tokens"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
            made.bytes += done.index["file_bytes"][0].as_py() if len(done.index) else 0
            bar.update(len(done.index) + len(done.aside))
            if time.monotonic() - last > COMMIT_SECONDS:
                _list(cfg, waiting, held)
                waiting, last = [], time.monotonic()
    _list(cfg, waiting, held)
    return made


def _list(cfg: Config, rows: list[pa.Table], held: Lease) -> None:
    """Add rows to the table feature_index, while this process holds the lease."""
    if not any(map(len, rows)):
        return
    cfg.table("feature_index").under(held.check).append(pa.concat_tables(rows))


def chunks_of(samples: pa.Table, tokens: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Rows CHUNK of `samples`, `size` of them at a time (the last may have fewer), in the order of
    `tokens`.
    """
    names, columns = samples["sample_id"].combine_chunks(), CHUNK[len(SAMPLE) :]
    waiting: list[pa.Table] = []
    for batch in tokens:
        found = pc.index_in(batch["sample_id"], names)  # pyright: ignore[reportAttributeAccessIssue]
        rows = samples.select(SAMPLE).take(found)
        for column in columns:
            rows = rows.append_column(column, batch[column])
        waiting.append(rows)
        if sum(map(len, waiting)) >= size:
            table = pa.concat_tables(waiting)
            whole = len(table) - len(table) % size
            yield from (table.slice(i, size) for i in range(0, whole, size))
            waiting = [table.slice(whole)]
    if sum(map(len, waiting)):
        yield pa.concat_tables(waiting)


def repair(cfg: Config, place: Place, held: Lease) -> None:
    """Take damaged features out of the cache, with a message, and list the finished shards of an
    interrupted harvest.
    """
    hidden, top_k = target_config(cfg)["hidden_size"], cfg.harvest.top_k
    identity, taps, dtype = target_id(cfg.target_path), list(target_taps(cfg)), cfg.harvest.features
    schema = features_schema(identity, taps, hidden, DTYPES[dtype], top_k)
    mended = mend(place, cfg.table("feature_index").under(held.check), schema)
    for name, fault in sorted(mended.damaged.items())[:SHOWN_DAMAGED]:
        console.print(f"features of sample {name}: {fault}; harvested again", markup=False)
    if mended.damaged or mended.lost:
        console.print(
            f"damaged features: {len(mended.damaged)} samples and {len(mended.lost)} whole files "
            f"of {place}; harvested again",
            markup=False,
        )


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
