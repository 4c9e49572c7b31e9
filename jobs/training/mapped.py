"""Training samples in memory-mapped files: a process holds only the parts that it is reading.

Every rank on a node maps the same files, <scratch>/training_data/tokens-<pin>.arrow and, where the
loss needs log-probabilities, top-<pin>-<k>.arrow. The first that needs one makes it from traffic/
or features/ in one streaming pass. A file that is deleted is made again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dflash.batches import Sample, first_tokens
from store.features import ids_digest
from store.files import commit, exclusive

TOKENS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("domain", pa.string()),
        ("ids", pa.large_list(pa.int32())),  # prompt + output
        ("ids_digest", pa.binary(16)),
        ("loss_mask", pa.large_list(pa.struct([("start", pa.int32()), ("end", pa.int32())]))),
    ]
)
TOP = pa.schema(
    [
        ("sample_id", pa.string()),
        ("top_ids", pa.large_list(pa.int32())),  # [n_output, top_k], flat
        ("top_logprobs", pa.large_list(pa.float16())),
    ]
)
NO_FEATURES = torch.empty(0, 0, dtype=torch.bfloat16)
TOGETHER = 256
"""Samples whose log-probabilities are in memory while a file is written."""


def mapped(
    path: Path, schema: pa.Schema, batches: Callable[[], Iterable[pa.RecordBatch]]
) -> pa.Table:
    """The table in the Arrow file `path`, memory-mapped. If it is absent, one of the processes that
    want it writes it from `batches()`.
    """

    def write(stream: Any) -> None:
        with pa.ipc.new_file(stream, schema) as writer:
            for batch in batches():
                writer.write(batch)

    while not path.is_file():
        with exclusive(path.with_suffix(".lock"), "another process") as other:
            if other:
                time.sleep(0.1)
            elif not path.is_file():
                commit(path, write)
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def token_batches(pinned: pa.Table, found: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """TOKENS rows of pinned samples, from batches of their sample_id, prompt_ids and output_ids.

    Raises ValueError if any is missing.
    """
    names = pinned["sample_id"].combine_chunks()
    missing = np.ones(len(names), bool)
    for batch in found:
        place = pc.index_in(batch["sample_id"], names)  # pyright: ignore[reportAttributeAccessIssue]
        missing[place.to_numpy()] = False
        rows = pinned.take(place)
        mask = rows["loss_mask"].combine_chunks().cast(TOKENS.field("loss_mask").type)
        ids = _joined(batch["prompt_ids"], batch["output_ids"])
        digests = pa.array([ids_digest(one.values.to_numpy()) for one in ids], pa.binary(16))
        columns = [batch["sample_id"], rows["domain"].combine_chunks(), ids, digests, mask]
        yield pa.RecordBatch.from_arrays(columns, schema=TOKENS)
    if missing.any():
        raise ValueError(not_in_traffic(names.filter(pa.array(missing)).to_pylist()))


def not_in_traffic(names: Sequence[str]) -> str:
    """What is wrong with a run whose samples `names` were deleted, and what to do."""
    return (
        f"{len(names)} of its samples are not in traffic/ any more, for instance {min(names)}: run "
        "`flywheel select`, and `flywheel train` begins a run without them"
    )


def top_batches(found: Iterable[tuple[str, Tensor, Tensor]]) -> Iterator[pa.RecordBatch]:
    """TOP rows of (sample id, token ids [n, k], log-probabilities [n, k])."""
    rows = ((name, *(t.flatten().numpy() for t in tensors)) for name, *tensors in found)
    while some := list(islice(rows, TOGETHER)):
        columns = zip(*some, strict=True)
        arrays = [pa.array(values, f.type) for values, f in zip(columns, TOP, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=TOP)


def _joined(first: pa.Array, second: pa.Array) -> pa.Array:
    """Each list of `first` followed by that of `second`."""
    parts = [(one.flatten().to_numpy(), _lengths(one)) for one in (first, second)]
    sizes = parts[0][1] + parts[1][1]
    values = np.empty(int(sizes.sum()), np.int32)
    # Of every value, the row that it belongs to decides where it goes.
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else sizes
    for (flat, lengths), start in zip(parts, (starts, starts + parts[0][1]), strict=True):
        own = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
        values[np.arange(len(flat)) + np.repeat(start - own, lengths)] = flat
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(offsets, pa.array(values))


def _lengths(lists: pa.Array) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]


class MappedSamples(Sequence[Sample]):
    """Rows of TOKENS as samples without features, in the order of `names`; each is made when it is
    taken. max_length: tokens kept of each (0: all).
    """

    def __init__(
        self,
        tokens: pa.Table,
        names: pa.Array,
        top: pa.Table | None = None,
        top_k: int = 0,
        max_length: int = 0,
    ):
        self.tokens, self.top, self.top_k, self.max_length = tokens, top, top_k, max_length
        self.rows = _places(tokens, names)
        self.top_rows = None if top is None else _places(top, names)

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """The id of a sample."""
        return self.tokens["sample_id"][int(self.rows[index])].as_py()

    def digests(self) -> tuple[pa.Array, pa.Array]:
        """Sample ids, and the `ids_digest` of each before it is cut."""
        taken = self.tokens.select(["sample_id", "ids_digest"]).take(pa.array(self.rows))
        return taken["sample_id"].combine_chunks(), taken["ids_digest"].combine_chunks()

    def __getitem__(self, index: Any) -> Any:
        sample = self._whole(index)
        return first_tokens(sample, self.max_length) if self.max_length else sample

    def whole_length(self, index: int) -> int:
        """Tokens of a sample before it is cut."""
        return len(self.tokens["ids"][int(self.rows[index])])

    def _whole(self, index: int) -> Sample:
        row = int(self.rows[index])
        columns = ("sample_id", "domain", "ids", "loss_mask")
        name, domain, ids, spans = (self.tokens[column][row] for column in columns)
        ids = torch.from_numpy(ids.values.to_numpy().astype(np.int64))
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for span in spans.as_py():
            mask[span["start"] : span["end"]] = True
        return Sample(name.as_py(), domain.as_py(), ids, mask, NO_FEATURES, *self._top(index))

    def subset(self, order: Sequence[int]) -> "MappedSamples":
        """These samples, in this order."""
        names = self.tokens["sample_id"].take(pa.array(self.rows[list(order)])).combine_chunks()
        return MappedSamples(self.tokens, names, self.top, self.top_k, self.max_length)

    def _top(self, index: int) -> tuple[Tensor, ...]:
        if self.top is None or self.top_rows is None:
            return ()
        row = int(self.top_rows[index])
        lists = (self.top[column][row] for column in TOP.names[1:])
        return tuple(
            torch.from_numpy(one.values.to_numpy().copy()).view(-1, self.top_k) for one in lists
        )


def _places(table: pa.Table, names: pa.Array) -> np.ndarray:
    """The row of each name."""
    found = pc.index_in(names, table["sample_id"].combine_chunks())  # pyright: ignore[reportAttributeAccessIssue]
    assert not found.null_count
    return found.to_numpy()
