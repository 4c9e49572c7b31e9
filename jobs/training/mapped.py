"""Training samples in memory-mapped files: a process holds only the parts that it is reading.

Every rank on a node maps the same files, <scratch>/training_data/tokens-<pin>.arrow and, where the
loss needs log-probabilities, top-<pin>-<k>.arrow. They are made from traffic/ and features/ in one
streaming pass, and are made again if they are deleted.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dflash.batches import Sample, first_tokens
from store.files import commit

TOKENS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("domain", pa.string()),
        ("ids", pa.large_list(pa.int32())),  # prompt + output
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


def mapped(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """The table in the Arrow file `path`, memory-mapped; written from `batches` if it is absent."""
    if not path.is_file():

        def write(stream: Any) -> None:
            with pa.ipc.new_file(stream, schema) as writer:
                for batch in batches:
                    writer.write(batch)

        commit(path, write)
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def token_batches(pinned: pa.Table, found: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """TOKENS rows of pinned samples, from batches of their sample_id, prompt_ids and output_ids."""
    names = pinned["sample_id"].combine_chunks()
    for batch in found:
        place = pc.index_in(batch["sample_id"], names)  # pyright: ignore[reportAttributeAccessIssue]
        rows = pinned.take(place)
        mask = rows["loss_mask"].combine_chunks().cast(TOKENS.field("loss_mask").type)
        ids = _joined(batch["prompt_ids"], batch["output_ids"])
        columns = [batch["sample_id"], rows["domain"].combine_chunks(), ids, mask]
        yield pa.RecordBatch.from_arrays(columns, schema=TOKENS)


def top_batches(found: Iterable[tuple[str, Tensor, Tensor]]) -> Iterator[pa.RecordBatch]:
    """TOP rows of (sample id, token ids [n, k], log-probabilities [n, k])."""
    for name, ids, logprobs in found:
        row = [[name], [ids.flatten().numpy()], [logprobs.flatten().numpy()]]
        arrays = [pa.array(v, f.type) for v, f in zip(row, TOP, strict=True)]
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

    def __getitem__(self, index: Any) -> Any:
        sample = self.whole(index)
        return first_tokens(sample, self.max_length) if self.max_length else sample

    def whole(self, index: int) -> Sample:
        """A sample before it is cut."""
        row = int(self.rows[index])
        name, domain, ids, spans = (self.tokens[column][row] for column in TOKENS.names)
        ids = torch.from_numpy(ids.values.to_numpy().astype(np.int64))
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for span in spans.as_py():
            mask[span["start"] : span["end"]] = True
        return Sample(name.as_py(), domain.as_py(), ids, mask, NO_FEATURES, *self._top(index))

    def subset(self, order: Sequence[int]) -> "MappedSamples":
        """These samples, in this order."""
        names = pc.take(self.tokens["sample_id"], pa.array(self.rows[list(order)]))
        names = names.combine_chunks()
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
    """The row of each name. Raises ValueError naming one that the table lacks."""
    found = pc.index_in(names, table["sample_id"].combine_chunks())  # pyright: ignore[reportAttributeAccessIssue]
    if found.null_count:
        missing = names.filter(found.is_null())
        raise ValueError(
            f"{len(missing)} of {len(names)} samples of this run are not in traffic/ any more, for "
            f"instance {missing[0].as_py()}: run `flywheel train` again, which starts a new one"
        )
    return found.to_numpy(zero_copy_only=False)
