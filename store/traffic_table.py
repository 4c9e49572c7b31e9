"""Reading traffic: one row per sample, however many logs contain it, and the side of its group."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store.groups import ORDER, form, idle_labels
from store.ids import prompt_conversation, says_nothing
from store.leakage import token_bytes
from store.schemas import TIMESTAMP, TRAFFIC
from store.tables import Table, told

MERGED = (
    "sample_id",
    "conversation_id",
    "domain",
    "language",
    "tenant",
    "captured_at",
    "request_id",
    "repeat_count",
    "split",
    "split_by_prompt",
)
"""Columns that, with the prompts, decide how rows are merged and grouped."""


def tokens_of(
    traffic: Table,
    names: Collection[str] | pa.Array,
    columns: Sequence[str],
    since: datetime | None = None,
    until: datetime | None = None,
) -> Iterator[pa.RecordBatch]:
    """`sample_id` and these columns of the TRAFFIC rows of these samples, each once, in batches.

    Rows of equal sample_id have equal token ids; of other columns, any row's value is given. Only
    shards with samples captured between `since` and `until` are read.
    """
    wanted = pa.array(names, pa.string()) if not isinstance(names, pa.Array) else names
    where = pc.field("sample_id").isin(wanted)
    if since is not None:
        where &= pc.field("captured_at") >= pa.scalar(since, TIMESTAMP)
    if until is not None:
        where &= pc.field("captured_at") <= pa.scalar(until, TIMESTAMP)
    seen: set[str] = set()
    for batch in traffic.batches(list(dict.fromkeys(["sample_id", *columns])), where):
        fresh = [name not in seen and not seen.add(name) for name in batch["sample_id"].to_pylist()]
        if any(fresh):
            yield batch.filter(pa.array(fresh))


def prompts_of(traffic: Table, rows: pa.Table, version: int | None = None) -> dict[str, bytes]:
    """{sample id: its prompt's token ids as bytes} of the samples of these rows, which have their
    `sample_id` and `captured_at`, in a version of the table (None: the latest).

    Shards are read one after the other, each for what the others did not have. A scan of them all
    would read ahead, and hold the prompts of many logs that repeat the same samples.
    """
    columns, times = ["sample_id", "prompt_ids"], rows["captured_at"]
    missing, found = set(rows["sample_id"].to_pylist()), {}
    span = None
    if len(times) and not times.null_count:
        first, last = pc.min_max(times).values()  # pyright: ignore[reportAttributeAccessIssue]
        span = (pc.field("captured_at") >= first) & (pc.field("captured_at") <= last)
    with told(traffic.place):
        for shard in traffic.dataset(version).get_fragments(span):
            where = pc.field("sample_id").isin(pa.array(sorted(missing), pa.string()))
            for batch in shard.to_batches(TRAFFIC, columns, where, batch_readahead=2):
                prompts = token_bytes(pa.chunked_array([batch["prompt_ids"]]))
                found.update(zip(batch["sample_id"].to_pylist(), prompts, strict=True))
            missing -= found.keys()
            if not missing:
                break
    return found


def regroup(
    table: pa.Table,
    prompts: Mapping[str, bytes],
    unnamed: set[str],
    earlier: Mapping[str, str] | None = None,
) -> pa.Table:
    """TRAFFIC rows of one target with equal sample_id merged into one, split by group, sorted by
    sample_id. They need the columns MERGED; others are kept. prompts: `prompts_of` the samples.

    unnamed: domains that say nothing, such as "default". earlier: the sides of samples in earlier
    selections. A side only ever moves towards training, so that nothing that a drafter may have
    learned from becomes held out.
    """
    if table.num_rows == 0:
        return table
    table = _sorted(table, unnamed)
    names = table["sample_id"].to_numpy(zero_copy_only=False)
    first = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
    repeats = np.add.reduceat(table["repeat_count"].to_numpy(zero_copy_only=False), first)
    merged = table.take(pa.array(first))
    texts = [prompts[name] for name in merged["sample_id"].to_pylist()]
    conversations, splits = _grouped(merged, texts, _labels(table, first), earlier or {})
    for name, values in (
        ("repeat_count", pa.array(repeats.astype(np.int32), pa.int32())),
        ("conversation_id", pa.array(conversations, pa.string())),
        ("split", pa.array(splits, pa.string())),
    ):
        merged = merged.set_column(merged.schema.get_field_index(name), name, values)
    return merged


def _sorted(table: pa.Table, unnamed: set[str]) -> pa.Table:
    """Rows by sample. Of one sample, the row with the most labels is first, then the earliest."""
    columns = [table[name].to_pylist() for name in ("domain", "language", "tenant")]
    missing = [
        (domain in unnamed) + (language is None) + (tenant is None)
        for domain, language, tenant in zip(*columns, strict=True)
    ]
    unlabelled = [says_nothing(label) for label in table["conversation_id"].to_pylist()]
    keys = {"unlabelled": unlabelled, "missing": missing, "row": range(table.num_rows)}
    sortable = table.select(["sample_id", "captured_at", "request_id", "conversation_id"])
    for name, values in keys.items():
        sortable = sortable.append_column(name, pa.array(values))
    order = ["sample_id", "unlabelled", "missing", "captured_at", "request_id", "conversation_id"]
    return table.take(sortable.sort_by([(name, "ascending") for name in order])["row"])


def _labels(table: pa.Table, first: np.ndarray) -> list[set[str]]:
    """The conversation labels of each sample, without those that say nothing."""
    rows = table["conversation_id"].to_pylist()
    stops = [*first[1:].tolist(), len(rows)]
    found = [set(rows[a:b]) for a, b in zip(first.tolist(), stops, strict=True)]
    idle = idle_labels(Counter(label for labels in found for label in labels))
    return [
        {one for one in labels if one not in idle and not says_nothing(one)} for labels in found
    ]


def _grouped(
    merged: pa.Table, prompts: list[bytes], labels: list[set[str]], earlier: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """(conversation, split) of each sample."""
    own = merged["conversation_id"].to_pylist()
    by_label, by_prompt = merged["split"].to_pylist(), merged["split_by_prompt"].to_pylist()
    splits = [
        named if mine in some else unnamed or named
        for mine, some, named, unnamed in zip(own, labels, by_label, by_prompt, strict=True)
    ]
    times = merged.select(["captured_at", "sample_id"])
    times = times.append_column("row", pa.array(range(len(times))))
    by_time = times.sort_by([("captured_at", "ascending"), ("sample_id", "ascending")])
    order = by_time["row"].to_pylist()
    founders, sides = form(prompts, labels, splits, order)
    sides = _kept_sides(merged["sample_id"].to_pylist(), founders, sides, earlier)

    def conversation(sample: int) -> str:
        if own[sample] in labels[sample]:
            return own[sample]
        return prompt_conversation(np.frombuffer(prompts[sample], "<i4"))

    named = {founder: conversation(founder) for founder in set(founders)}
    conversations = [
        mine if mine in some else named[founder]
        for mine, some, founder in zip(own, labels, founders, strict=True)
    ]
    return conversations, sides


def _kept_sides(
    names: list[str], founders: list[int], sides: list[str], earlier: Mapping[str, str]
) -> list[str]:
    """The side of each sample: that of its group, or an earlier one of the group's samples, if that
    is nearer to training.
    """
    nearest = dict(zip(founders, sides, strict=True))
    for name, founder in zip(names, founders, strict=True):
        if name in earlier:
            nearest[founder] = min(nearest[founder], earlier[name], key=ORDER.index)
    return [nearest[founder] for founder in founders]
