"""The feature cache: bf16 tensors as two byte planes, since Arrow has no bfloat16.

High bytes (sign, exponent) repeat and compress well, low bytes hardly do: apart, zstd-1 stores
0.70 of the raw size and reads faster than one mixed column.
"""

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from store.ids import short_hash
from store.schemas import LAYOUT_VERSION, features_schema

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import torch


def cache_key(target_id: str, taps: list[int], dtype: str, top_k: int = 0) -> str:
    """Folder name of the features that one (target, taps, dtype, layout, top_k) gives."""
    parts = [target_id, list(taps), dtype, LAYOUT_VERSION]
    return short_hash([*parts, top_k] if top_k else parts)


def encode(features: "torch.Tensor") -> tuple[bytes, bytes]:
    """Split bf16 [T, D] into its (high, low) bytes, each T * D long. Bit exact."""
    import torch

    if features.dtype != torch.bfloat16 or features.dim() != 2:
        raise ValueError(
            f"features must be bfloat16 [T, D], got {features.dtype} {list(features.shape)}"
        )
    words = features.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return (words >> 8).astype(np.uint8).tobytes(), words.astype(np.uint8).tobytes()


def decode(hi: bytes, lo: bytes, n_tokens: int) -> "torch.Tensor":
    """The bf16 [n_tokens, D] tensor that `encode` split. Raises ValueError on wrong lengths.
    `hi` and `lo` may be any buffers, for instance Arrow's `scalar.as_buffer()` (no copy).
    """
    import torch

    size = memoryview(hi).nbytes
    if n_tokens <= 0 or size != memoryview(lo).nbytes or size % n_tokens or size == 0:
        raise ValueError(
            f"planes of {size} and {memoryview(lo).nbytes} bytes do not hold {n_tokens} tokens"
        )
    words = np.frombuffer(hi, np.uint8).astype(np.uint16)
    words <<= 8
    words |= np.frombuffer(lo, np.uint8)
    return torch.from_numpy(words.view(np.int16)).reshape(n_tokens, -1).view(torch.bfloat16)


def open_shard(
    path: Path, target_id: str, target_layer_ids: list[int], hidden_size: int, top_k: int = 0
) -> pq.ParquetFile:
    """A features shard that was made from this target, these taps, this width and this layout,
    with this top_k if it is not 0.

    Raises ValueError otherwise: other features would train without any other sign.
    """
    file = pq.ParquetFile(path)
    wanted = features_schema(target_id, target_layer_ids, hidden_size, top_k=top_k).metadata
    found = file.schema_arrow.metadata or {}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path}: {name.decode()} is {found.get(name, b'missing').decode()!r}, "
                f"expected {value.decode()!r}; harvest again"
            )
    return file


def read_shard(
    path: Path, target_id: str, target_layer_ids: list[int], hidden_size: int
) -> "Iterator[tuple[str, torch.Tensor, float]]":
    """Yield (sample_id, bf16 [T, n_taps * hidden], argmax_match) from a features shard.

    One row group is in memory at a time. Raises ValueError as `open_shard` does.
    """
    file = open_shard(path, target_id, target_layer_ids, hidden_size)
    for group in range(file.num_row_groups):
        rows = file.read_row_group(group, ["sample_id", "n_tokens", "hi", "lo", "argmax_match"])
        for i, (name, features) in enumerate(
            _decode_rows(rows, len(target_layer_ids), hidden_size)
        ):
            yield name, features, rows["argmax_match"][i].as_py()


def read_top(
    path: Path, target_id: str, target_layer_ids: list[int], hidden_size: int, top_k: int
) -> "Iterator[tuple[str, torch.Tensor, torch.Tensor]]":
    """Yield (sample_id, token ids int32 [n_output, top_k], log-probabilities float16 of the same
    shape) from a features shard, without reading its features. Raises ValueError as `open_shard`.
    """
    import torch

    file = open_shard(path, target_id, target_layer_ids, hidden_size, top_k)
    for group in range(file.num_row_groups):
        rows = file.read_row_group(group, ["sample_id", "top_ids", "top_logprobs"])
        for i in range(rows.num_rows):
            ids, logprobs = (
                torch.tensor(_values(rows[name][i])).view(-1, top_k)
                for name in ("top_ids", "top_logprobs")
            )
            yield rows["sample_id"][i].as_py(), ids, logprobs


class FeatureCache:
    """Features by sample id, read from their shards when asked for.

    The row groups used last stay in memory up to `budget` bytes (the one in use always), so data
    that fits is read once, and data that does not is read again.
    """

    def __init__(
        self,
        paths: "Iterable[Path]",
        target_id: str,
        target_layer_ids: list[int],
        hidden_size: int,
        wanted: "Collection[str]",
        budget: float,
        max_length: int = 0,
    ):
        """Reads ids only. max_length: tokens kept of a sample, 0: all.

        Raises ValueError for shards of other features and for missing ids.
        """
        self.num_taps, self.hidden_size = len(target_layer_ids), hidden_size
        self.budget, self.size, self.max_length = budget, 0, max_length
        self.where: dict[str, tuple[Path, int]] = {}
        self.kept: OrderedDict[tuple[Path, int], dict[str, torch.Tensor]] = OrderedDict()
        for path in paths:
            file = open_shard(path, target_id, target_layer_ids, hidden_size)
            for group in range(file.num_row_groups):
                names = file.read_row_group(group, ["sample_id"])["sample_id"].to_pylist()
                self.where |= {name: (path, group) for name in names if name in wanted}
        check_all_harvested(self.where, wanted)

    def __getitem__(self, sample_id: str) -> "torch.Tensor":
        """bf16 [T, n_taps * hidden], T at most max_length."""
        where = self.where[sample_id]
        if where not in self.kept:
            self._read(where)
        self.kept.move_to_end(where)
        return self.kept[where][sample_id]

    def _read(self, where: "tuple[Path, int]") -> None:
        path, group = where
        rows = pq.ParquetFile(path).read_row_group(group, ["sample_id", "n_tokens", "hi", "lo"])
        decoded = _decode_rows(rows, self.num_taps, self.hidden_size, self.where)
        self.kept[where] = {name: self._cut(features) for name, features in decoded}
        self.size += _bytes(self.kept[where])
        while self.size > self.budget and len(self.kept) > 1:
            self.size -= _bytes(self.kept.popitem(last=False)[1])

    def _cut(self, features: "torch.Tensor") -> "torch.Tensor":
        if 0 < self.max_length < len(features):
            return features[: self.max_length].clone()  # a view would keep all of it in memory
        return features


def check_all_harvested(found: "Collection[str]", wanted: "Collection[str]") -> None:
    """Raise ValueError naming one of the wanted samples that have no features."""
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(wanted)} samples have no features (for instance "
            f"{min(missing)}): run `flywheel harvest`"
        )


def _decode_rows(
    rows: pa.Table, num_taps: int, hidden_size: int, wanted: "Collection[str] | None" = None
) -> "Iterator[tuple[str, torch.Tensor]]":
    for i, name in enumerate(rows["sample_id"].to_pylist()):
        if wanted is not None and name not in wanted:
            continue
        n_tokens = rows["n_tokens"][i].as_py()
        features = decode(_buffer(rows["hi"][i]), _buffer(rows["lo"][i]), n_tokens)
        if features.shape[1] != num_taps * hidden_size:
            raise ValueError(
                f"sample {name}: features of width {features.shape[1]}, not "
                f"{num_taps * hidden_size}; harvest again"
            )
        yield name, features


def _bytes(group: "dict[str, torch.Tensor]") -> int:
    return sum(features.nbytes for features in group.values())


def _values(scalar: pa.Scalar) -> np.ndarray:
    return scalar.values.to_numpy()  # pyright: ignore[reportAttributeAccessIssue]


def _buffer(scalar: pa.Scalar) -> bytes:
    return scalar.as_buffer()  # pyright: ignore[reportAttributeAccessIssue]
