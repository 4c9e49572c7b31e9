"""Reading the feature cache by sample: features, or log-probabilities without features."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from store.feature_index import check_all_harvested
from store.feature_shards import (
    COLUMNS,
    TOP_COLUMNS,
    dtype_of,
    features_of,
    marking,
    open_shard,
    read_group,
    row_damaged,
)
from store.features import as_numpy, top_fault
from store.place import Place
from store.schemas import features_schema

if TYPE_CHECKING:
    import torch

KEPT_FOOTERS = 256
Where = tuple[str, int]
"""Shard and row group."""


class FeatureCache:
    """Features by sample id, read from their shards when asked for.

    The most recently used row groups stay in memory, up to `budget` bytes; the one in use always
    stays. Data that fits is read once, data that does not fit is read again. For use by one thread;
    `readers` threads of its own read what `prefetch` names.
    """

    def __init__(
        self,
        place: Place,
        index: pa.Table,
        target_id: str,
        target_layer_ids: list[int],
        hidden_size: int,
        digests: pa.Array | None,
        budget: float,
        max_length: int = 0,
        readers: int = 2,
    ):
        """Reads nothing. place: features/<cache key>. index: from `store.feature_index.index_of`.
        digests: for each row of the index, `ids_digest` of the token ids that its features must
        have been made from; None: of any. max_length: tokens kept of each sample (0: all).
        """
        self.place, self.digests = place, digests
        self.schema = features_schema(target_id, target_layer_ids, hidden_size)
        self.width = len(target_layer_ids) * hidden_size
        self.budget, self.size, self.max_length = budget, 0, max_length
        self.names = index["sample_id"].combine_chunks()
        self.files = index["file"].combine_chunks().dictionary_encode()
        self.groups = index["row_group"].combine_chunks()
        self.kept: OrderedDict[Where, dict[str, torch.Tensor]] = OrderedDict()
        self.coming: dict[Where, Future[dict[str, torch.Tensor]]] = {}
        self.due: Counter[Where] = Counter()
        self.pool = ThreadPoolExecutor(readers, thread_name_prefix="features")
        self.footer = lru_cache(KEPT_FOOTERS)(self._footer)

    def __getitem__(self, sample_id: str) -> "torch.Tensor":
        """bf16 [T, n_taps * hidden], T at most max_length.

        Raises ValueError for a sample that has no features or damaged ones, features of other token
        ids, and a shard of another cache; OSError if the store does not answer.
        """
        row = self._row(sample_id)
        check_all_harvested(() if row is None else [sample_id], [sample_id])
        assert row is not None
        where = self._where(row)
        with marking(self.place):
            if where not in self.kept:
                coming = self.coming.pop(where, None) or self.pool.submit(self._read, where)
                self.kept[where] = coming.result()
                self.size += _bytes(self.kept[where])
            self.kept.move_to_end(where)
            group = self.kept[where]
            if sample_id not in group:
                fault = "they are not where they are listed"
                raise row_damaged(self.place, where[0], sample_id, fault)
        if self.due[where]:
            self.due[where] -= 1
        self._shrink(where)
        return group[sample_id]

    def prefetch(self, sample_ids: Iterable[str]) -> None:
        """Begin to read these samples, in this order; ask for each of them afterwards, as often as
        it is named. Until then its row group stays in memory, on top of the budget.
        """
        for row in map(self._row, sample_ids):
            if row is not None:
                where = self._where(row)
                self.due[where] += 1
                if where not in self.kept and where not in self.coming:
                    self.coming[where] = self.pool.submit(self._read, where)

    def _row(self, sample_id: str) -> int | None:
        i = bisect_left(self.names, sample_id, key=_text)  # pyright: ignore[reportArgumentType]
        return i if i < len(self.names) and _text(self.names[i]) == sample_id else None

    def _where(self, row: int) -> Where:
        return self.files[row].as_py(), self.groups[row].as_py()

    def _read(self, where: Where) -> "dict[str, torch.Tensor]":
        name, group = where
        footer = self.footer(name)
        rows, dtype = read_group(self.place, name, footer, group, COLUMNS), dtype_of(footer)
        found = {}
        for i, sample in enumerate(rows["sample_id"].to_pylist()):
            at = self._row(sample)
            if at is None or self._where(at) != where:
                continue  # not wanted, or damaged and computed again
            row = {column: rows[column][i] for column in COLUMNS}
            made_from = None if self.digests is None else self.digests[at].as_py()
            features = features_of(self.place, name, row, dtype, self.width, made_from)
            found[sample] = self._cut(features)
        return found

    def _footer(self, name: str) -> pq.FileMetaData:
        return open_shard(self.place, name, self.schema)

    def _shrink(self, using: Where) -> None:
        """Forget row groups until the budget holds, those first that were used longest ago."""
        for where in list(self.kept) if self.size > self.budget else ():
            if where != using and not self.due[where]:
                self.size -= _bytes(self.kept.pop(where))
            if self.size <= self.budget:
                return

    def _cut(self, features: "torch.Tensor") -> "torch.Tensor":
        if 0 < self.max_length < len(features):
            return features[: self.max_length].clone()  # a view would keep all of it in memory
        return features


def read_top(
    place: Place,
    index: pa.Table,
    target_id: str,
    target_layer_ids: list[int],
    hidden_size: int,
    top_k: int,
) -> "Iterator[tuple[str, torch.Tensor, torch.Tensor]]":
    """Yield (sample_id, token ids int32 [n_output, top_k], log-probabilities float16 of the same
    shape) of the samples of an index (store.feature_index.index_of), shard by shard, without
    reading features. Raises as `FeatureCache`.
    """
    import torch

    schema = features_schema(target_id, target_layer_ids, hidden_size, top_k=top_k)
    with marking(place):
        for name, groups in groupby(_by_group(index), key=lambda found: found[0]):
            footer = open_shard(place, name, schema)
            for _, group, wanted in groups:
                rows = read_group(place, name, footer, group, TOP_COLUMNS)
                for i, sample in enumerate(rows["sample_id"].to_pylist()):
                    if sample in wanted:
                        row = {column: rows[column][i] for column in TOP_COLUMNS}
                        if fault := top_fault(row):
                            raise row_damaged(place, name, sample, fault)
                        found = as_numpy(row["top_ids"]), as_numpy(row["top_logprobs"])
                        ids, logprobs = (torch.tensor(one).view(-1, top_k) for one in found)
                        yield sample, ids, logprobs


def _by_group(index: pa.Table) -> Iterator[tuple[str, int, set[str]]]:
    """(shard, row group, its samples), in the order of shards and row groups."""
    ordered = index.sort_by([("file", "ascending"), ("row_group", "ascending")])
    rows = (
        (row["file"], row["row_group"], row["sample_id"])
        for batch in ordered.to_batches(max_chunksize=1024)
        for row in batch.to_pylist()
    )
    for (name, group), found in groupby(rows, key=lambda row: row[:2]):
        yield name, group, {row[2] for row in found}


def _text(scalar: pa.Scalar) -> str:
    return scalar.as_py()


def _bytes(group: "dict[str, torch.Tensor]") -> int:
    return sum(features.nbytes for features in group.values())
