"""Selected samples, with their token ids and features: what harvest, training and replay read."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dflash.identity import legacy_target_id, target_id
from jobs.base.config import Config
from jobs.base.target_facts import target_config, target_taps
from store.feature_cache import FeatureCache, read_top
from store.feature_codec import DTYPES
from store.feature_index import check_all_harvested, index_of
from store.features import cache_key, ids_digest
from store.place import Place
from store.set_aside import read_set_aside
from store.traffic_table import tokens_of

CACHE_BYTES = 1 << 30
"""Features of requests that are in memory at a time."""

Row = dict[str, Any]


def captured_top_k(cfg: Config) -> int:
    """How many log-probabilities per position training reads: 0 for train.loss=ce.

    Raises ValueError if train.loss needs them and harvest.top_k is 0.
    """
    if cfg.train.loss == "ce":
        return 0
    if cfg.harvest.top_k == 0:
        raise ValueError(
            f"train.loss={cfg.train.loss} needs the target's log-probabilities: put `harvest: "
            f"{{top_k: {16 if cfg.train.loss == 'kl' else 1}}}` into the config file and run "
            "`flywheel harvest` with it"
        )
    return cfg.harvest.top_k


def selection_version(cfg: Config) -> int | None:
    """The version of selection/ that stages read: select.version, or the latest."""
    version = cfg.select.version
    return cfg.table("selection").version() if version < 0 else version


def at_one_selection(cfg: Config) -> Config:
    """`cfg` for a stage that reads the selection more than once: a selection that is committed
    meanwhile changes nothing.
    """
    version = selection_version(cfg)
    return cfg if version is None else cfg.override("select", version=version)


def selected(cfg: Config, split: str | None = None) -> pa.Table:
    """SELECTION rows of this target, of one split or all, sorted by sample_id.

    Raises ValueError if nothing was selected.
    """
    mine = pc.field("target_id") == target_id(cfg.target_path)
    version = selection_version(cfg)
    rows = cfg.table("selection").read(where=mine, version=version)
    if not rows.num_rows:
        raise none_of_target(cfg, "selected sample", "run `flywheel select`")
    if split is not None:
        rows = rows.filter(pc.field("split") == split)
    return rows.sort_by("sample_id")


def usable(cfg: Config, rows: pa.Table, taps: Sequence[int] = ()) -> pa.Table:
    """SELECTION rows without those that harvest set aside under these taps."""
    aside = pa.array(sorted(set_aside(cfg, taps)), pa.string())
    return rows.filter(~pc.field("sample_id").isin(aside))


def with_tokens(
    cfg: Config, rows: pa.Table, columns: Sequence[str] = ("prompt_ids", "output_ids")
) -> Iterator[pa.RecordBatch]:
    """`sample_id` and these TRAFFIC columns of SELECTION rows, in batches, in any order. Samples
    that were deleted from traffic/ are missing.
    """
    times = rows["captured_at"]
    bounds = {} if times.null_count or not len(times) else pc.min_max(times).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    names = rows["sample_id"].combine_chunks()
    yield from tokens_of(cfg.table("traffic"), names, columns, bounds.get("min"), bounds.get("max"))


def load_rows(
    cfg: Config, split: str, sampled: bool = False, taps: Sequence[int] = ()
) -> list[Row]:
    """Selected rows of a split with their token ids, in sample_id order, without those set aside
    under these taps: only greedy ones, or all if `sampled`. For held-out splits: the budgets of
    `flywheel select` bound them.
    """
    rows = usable(cfg, selected(cfg, split), taps)
    if not sampled:
        rows = rows.filter(pc.field("temperature") == 0.0)
    tokens = {
        row["sample_id"]: row for batch in with_tokens(cfg, rows) for row in batch.to_pylist()
    }
    found = rows.to_pylist()
    return [row | tokens[row["sample_id"]] for row in found if row["sample_id"] in tokens]


def load_requests(
    cfg: Config, split: str, sampled: bool = False, taps: Sequence[int] = ()
) -> "tuple[list[Row], Requests]":
    """Rows of a split with their requests, in sample_id order: only greedy ones, or all if
    `sampled`.

    taps: the target layers whose features are read; the configured ones if empty.
    """
    rows = load_rows(cfg, split, sampled, taps)
    return rows, with_features(cfg, rows, taps)


def rows_with_rounds(cfg: Config, taps: Sequence[int] = ()) -> list[Row]:
    """Greedy held-out rows (evaluate.split) whose answer has more than one token, so that it has a
    round. They can be sent to a server again. Raises ValueError if there is none.
    """
    rows = load_rows(cfg, cfg.evaluate.split, taps=taps)
    rows = [row for row in rows if len(row["output_ids"]) > 1]
    if not rows:
        fix = "ingest more conversations or set evaluate.split"
        raise none_of_target(cfg, f"greedy {cfg.evaluate.split} sample", fix)
    return rows


@dataclass(frozen=True)
class StoredRequest:
    """A request whose features are read when they are asked for (dflash.replay.Replayable).

    ids [P + n] int64: prompt and output.
    """

    sample_id: str
    ids: Tensor
    num_prompt: int
    cache: FeatureCache

    @property
    def num_output(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.num_prompt

    @property
    def features(self) -> Tensor:
        """bf16 [P + n, n_taps * hidden]. Raises ValueError if they are damaged."""
        return self.cache[self.sample_id]


Requests = list[StoredRequest]


def with_features(cfg: Config, rows: Sequence[Row], taps: Sequence[int] = ()) -> Requests:
    """Rows with token ids as requests to replay.

    Raises ValueError for rows that were not harvested. Features that are damaged, or were made from
    other token ids, raise it when they are read.
    """
    ids = {row["sample_id"]: torch.tensor([*row["prompt_ids"], *row["output_ids"]]) for row in rows}
    digests = pa.array([ids_digest(found.numpy()) for found in ids.values()], pa.binary(16))
    cache = feature_cache(cfg, pa.array(ids, pa.string()), digests, CACHE_BYTES, taps)
    return [
        StoredRequest(row["sample_id"], ids[row["sample_id"]], len(row["prompt_ids"]), cache)
        for row in rows
    ]


def feature_cache(
    cfg: Config,
    names: pa.Array,
    digests: pa.Array,
    budget: float,
    taps: Sequence[int] = (),
    max_length: int = 0,
    readers: int = 2,
) -> FeatureCache:
    """The features of the samples `names`, each cut to `max_length` tokens (0: uncut). At most
    `budget` bytes of them are kept in memory. digests: `ids_digest` of the tokens of each sample.

    Raises ValueError for samples that were not harvested.
    """
    place, identity = features_place(cfg, taps), target_id(cfg.target_path)
    index = index_of(cfg.table("feature_index"), place.name, names)
    check_all_harvested(index["sample_id"].to_pylist(), names.to_pylist())
    digests = digests.take(pc.index_in(index["sample_id"].combine_chunks(), names))  # pyright: ignore[reportAttributeAccessIssue]
    taps, hidden = list(taps or target_taps(cfg)), target_config(cfg)["hidden_size"]
    return FeatureCache(place, index, identity, taps, hidden, digests, budget, max_length, readers)


def harvested(cfg: Config, names: Collection[str], taps: Sequence[int] = ()) -> pa.Table:
    """Where the features of these samples are: rows of `store.features.index_of`."""
    place = features_place(cfg, taps)
    return index_of(cfg.table("feature_index"), place.name, pa.array(names, pa.string()))


def stored_top(cfg: Config, index: pa.Table) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(sample id, token ids int32 [n_output, top_k], log-probabilities float16 of that shape) of
    the target's likeliest tokens, for samples of an index. Reads no features.
    """
    identity, taps = target_id(cfg.target_path), list(target_taps(cfg))
    hidden, top_k = target_config(cfg)["hidden_size"], captured_top_k(cfg)
    yield from read_top(features_place(cfg), index, identity, taps, hidden, top_k)


def set_aside(cfg: Config, taps: Sequence[int] = ()) -> set[str]:
    """Ids of the samples that harvest set aside under these taps: training does not use them."""
    return set(read_set_aside(cfg.table("set_aside"), features_place(cfg, taps).name))


def features_place(cfg: Config, taps: Sequence[int] = ()) -> Place:
    """The folder of the feature cache for this target, these taps (default: the configured ones),
    harvest.features and harvest.top_k.
    """
    taps, identity = list(taps or target_taps(cfg)), target_id(cfg.target_path)
    dtype, top_k = DTYPES[cfg.harvest.features], cfg.harvest.top_k
    return cfg.place("features", cache_key(identity, taps, dtype, top_k))


def none_of_target(cfg: Config, what: str, fix: str) -> ValueError:
    """The error of a stage that finds no `what` ("test sample", say) of this target.

    If traffic/ has rows under the id that an older release gave this target, the message says so.
    """
    identity, former = target_id(cfg.target_path), legacy_target_id(cfg.target_path)
    known = targets_of_traffic(cfg)
    if former in known and identity not in known:
        fix = (
            f"its samples were made under this folder's former id {former}, which did not cover "
            "all bytes of the weights: run `flywheel ingest` again, on the logs they came from"
        )
    elif not known:
        fix = "run `flywheel ingest` first"
    return ValueError(f"{cfg.place()} has no {what} of target {identity}: {fix}")


def targets_of_traffic(cfg: Config) -> Counter[str]:
    """The targets that traffic/ has rows of, and how many."""
    found: Counter[str] = Counter()
    for batch in cfg.table("traffic").batches(["target_id"]):
        for entry in batch["target_id"].value_counts().to_pylist():
            found[entry["values"]] += entry["counts"]
    return found
