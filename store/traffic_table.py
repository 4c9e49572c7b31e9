"""Reading traffic: one row per sample, however many logs contain it."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store.groups import form, idle_labels
from store.ids import prompt_conversation, says_nothing
from store.leakage import token_bytes
from store.schemas import TRAFFIC
from store.shards import read_dataset, read_manifests


def read_traffic(folder: Path, target_id: str | None = None, split: str | None = None) -> pa.Table:
    """Published samples as TRAFFIC rows, sorted by sample_id, so the order never depends on logs.

    Rows of the same sample are merged into the one with the best labels, with the sum of the repeat
    counts. The column `split` is the side of the sample's group (store.groups). A sample without a
    label gets the conversation of its group's first sample. The arguments `target_id` and `split`
    select rows.
    """
    mine = None if target_id is None else pc.field("target_id") == target_id
    rules = [m["inputs"].get("rules", {}) for m in read_manifests(folder)]
    unnamed = {"default", *(r.get("default_domain", "default") for r in rules)}
    table = regroup(read_dataset(folder, TRAFFIC, filters=mine), unnamed)
    # Selected after merging: a sample seen in two conversations belongs to one split only.
    return table if split is None else table.filter(pc.field("split") == split)


def regroup(table: pa.Table, unnamed: set[str]) -> pa.Table:
    """TRAFFIC rows with equal sample_id merged into one, split by group, sorted by sample_id.

    unnamed: domains that say nothing, such as "default". Each target's samples are grouped apart.
    """
    if table.num_rows == 0:
        return table
    targets = table["target_id"].unique()
    if len(targets) > 1:
        parts = [table.filter(pc.field("target_id") == one) for one in targets]
        return pa.concat_tables(regroup(part, unnamed) for part in parts).sort_by("sample_id")
    table = _sorted(table, unnamed)
    names = table["sample_id"].to_numpy(zero_copy_only=False)
    first = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
    repeats = np.add.reduceat(table["repeat_count"].to_numpy(zero_copy_only=False), first)
    merged = table.take(pa.array(first))
    conversations, splits = _grouped(merged, _labels(table, first))
    for name, values in (
        ("repeat_count", pa.array(repeats.astype(np.int32), pa.int32())),
        ("conversation_id", pa.array(conversations, pa.string())),
        ("split", pa.array(splits, pa.string())),
    ):
        column = TRAFFIC.get_field_index(name)
        merged = merged.set_column(column, TRAFFIC.field(column), values)
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


def _grouped(merged: pa.Table, labels: list[set[str]]) -> tuple[list[str], list[str]]:
    """(conversation, split) of each sample."""
    prompts = token_bytes(merged["prompt_ids"])
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
