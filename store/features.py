"""The feature cache: shards of bf16 tensors, stored as store/feature_codec.py says.

A shard names the dtype of its bytes in its metadata. Readers give bf16, whatever that is.

Features are checked when they are read. A row carries two digests: of the token ids it was made
from, and of its feature bytes. The second is seeded with the sample's name and the first digest, so
features that were swapped between two samples are noticed too.
"""

import hashlib
import struct
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from store.feature_codec import BFLOAT16, DTYPES, decode, encode, is_finite
from store.ids import Ids, short_hash
from store.schemas import LAYOUT_VERSION, features_schema

if TYPE_CHECKING:
    import torch

COLUMNS = ["sample_id", "n_tokens", "ids_digest", "hi", "lo", "digest"]
TOP_COLUMNS = ["sample_id", "n_tokens", "ids_digest", "top_ids", "top_logprobs", "top_digest"]


def cache_key(target_id: str, taps: list[int], dtype: str, top_k: int = 0) -> str:
    """Folder name of the features that one (target, taps, dtype, layout, top_k) gives."""
    parts = [target_id, list(taps), dtype, LAYOUT_VERSION]
    return short_hash([*parts, top_k] if top_k else parts)


def ids_digest(ids: Ids) -> bytes:
    """16 bytes that name the token ids (prompt and output) of a sample."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()[:16]


def features_row(
    sample_id: str, ids: Ids, features: "torch.Tensor", dtype: str = BFLOAT16, num_taps: int = 1
) -> dict[str, Any]:
    """One FEATURES row of bf16 features [T, num_taps * hidden] of these T token ids, in one of
    store.feature_codec.DTYPES.
    """
    hi, lo = encode(features, dtype, num_taps)
    names, made_from = {"sample_id": sample_id, "n_tokens": len(features)}, ids_digest(ids)
    digest = _digest(_seed(sample_id, len(features), made_from), hi, lo)
    return names | {"ids_digest": made_from, "hi": hi, "lo": lo, "digest": digest}


def top_row(row: Mapping[str, Any], ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """The columns TOP of a FEATURES `row`. ids and logprobs are [n_output, top_k]; they are stored
    as int32 and float16.
    """
    ids, logprobs = ids.ravel().astype(np.int32), logprobs.ravel().astype(np.float16)
    seed = _seed(row["sample_id"], row["n_tokens"], row["ids_digest"])
    return {
        "top_ids": ids,
        "top_logprobs": logprobs,
        "top_digest": _digest(seed, ids, logprobs)[:4],
    }


def open_shard(
    path: Path, target_id: str, target_layer_ids: list[int], hidden_size: int, top_k: int = 0
) -> pq.ParquetFile:
    """Open a features shard that was made from this target, these taps, this hidden size and this
    layout, in a known dtype, and with this top_k if it is not 0.

    Raises ValueError for any other file: training on wrong features would give no other warning.
    """
    file = _open(path)
    found, dtype = file.schema_arrow.metadata or {}, _dtype(file)
    dtype = dtype if dtype in DTYPES.values() else " or ".join(DTYPES.values())
    wanted = features_schema(target_id, target_layer_ids, hidden_size, dtype, top_k).metadata
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path}: {name.decode()} is {found.get(name, b'missing').decode()!r}, "
                f"expected {value.decode()!r}; harvest again"
            )
    return file


def read_shard(
    path: Path,
    target_id: str,
    target_layer_ids: list[int],
    hidden_size: int,
    wanted: "Collection[str] | Mapping[str, bytes] | None" = None,
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield (sample_id, bf16 [T, n_taps * hidden]) of the wanted samples (None: all) of a shard.

    One row group is in memory at a time. If `wanted` maps sample ids to `ids_digest`s, each row
    must have been made from these token ids. Raises ValueError as `open_shard` does, and for a
    damaged row.
    """
    file = open_shard(path, target_id, target_layer_ids, hidden_size)
    width = len(target_layer_ids) * hidden_size
    for group in range(file.num_row_groups):
        yield from _rows(file, path, group, width, wanted)


def read_top(
    path: Path, target_id: str, target_layer_ids: list[int], hidden_size: int, top_k: int
) -> "Iterator[tuple[str, torch.Tensor, torch.Tensor]]":
    """Yield (sample_id, token ids int32 [n_output, top_k], log-probabilities float16 of the same
    shape) from a features shard, without reading its features. Raises ValueError as `read_shard`.
    """
    import torch

    file = open_shard(path, target_id, target_layer_ids, hidden_size, top_k)
    for group in range(file.num_row_groups):
        rows = _read_group(file, path, group, TOP_COLUMNS)
        for i in range(rows.num_rows):
            row = {name: rows[name][i] for name in TOP_COLUMNS}
            fault = _top_fault(row)
            if fault:
                raise _damaged(path, row["sample_id"].as_py(), fault)
            yield (
                row["sample_id"].as_py(),
                torch.tensor(_values(row["top_ids"])).view(-1, top_k),
                torch.tensor(_values(row["top_logprobs"])).view(-1, top_k),
            )


def find_faults(path: Path, file: pq.ParquetFile) -> dict[str, str]:
    """{sample_id: what is wrong} of every damaged row. Raises ValueError for a file that cannot be
    read.
    """
    faults: dict[str, str] = {}
    dtype = _dtype(file)
    names = [name for name in [*COLUMNS, *TOP_COLUMNS[3:]] if name in file.schema_arrow.names]
    for group in range(file.num_row_groups):
        rows = _read_group(file, path, group, names)
        for i in range(rows.num_rows):
            row = {name: rows[name][i] for name in names}
            fault = _fault(row, dtype) or ("top_ids" in row and _top_fault(row))
            if fault:
                faults[row["sample_id"].as_py()] = fault
    return faults


class FeatureCache:
    """Features by sample id, read from their shards when asked for.

    The most recently used row groups stay in memory, up to `budget` bytes; the one in use always
    stays. Data that fits is read once, data that does not fit is read again.
    """

    def __init__(
        self,
        paths: "Iterable[Path]",
        target_id: str,
        target_layer_ids: list[int],
        hidden_size: int,
        wanted: "Collection[str] | Mapping[str, bytes]",
        budget: float,
        max_length: int = 0,
    ):
        """Read the sample ids only. max_length: tokens kept of each sample (0: all). `wanted` is as
        in `read_shard`.

        Raises ValueError as `open_shard` does, and for wanted samples without features.
        """
        self.width = len(target_layer_ids) * hidden_size
        self.wanted = wanted
        self.budget, self.size, self.max_length = budget, 0, max_length
        self.where: dict[str, tuple[Path, int]] = {}
        self.kept: OrderedDict[tuple[Path, int], dict[str, torch.Tensor]] = OrderedDict()
        for path in paths:
            file = open_shard(path, target_id, target_layer_ids, hidden_size)
            for group in range(file.num_row_groups):
                names = _read_group(file, path, group, ["sample_id"])["sample_id"].to_pylist()
                self.where |= {name: (path, group) for name in names if name in wanted}
        check_all_harvested(self.where, wanted)

    def __getitem__(self, sample_id: str) -> "torch.Tensor":
        """bf16 [T, n_taps * hidden], T at most max_length. Raises ValueError as `read_shard`."""
        where = self.where[sample_id]
        if where not in self.kept:
            self._read(where)
        self.kept.move_to_end(where)
        return self.kept[where][sample_id]

    def _read(self, where: "tuple[Path, int]") -> None:
        path, group = where
        rows = _rows(_open(path), path, group, self.width, self.wanted)
        self.kept[where] = {name: self._cut(features) for name, features in rows}
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


def _rows(
    file: pq.ParquetFile,
    path: Path,
    group: int,
    width: int,
    wanted: "Collection[str] | Mapping[str, bytes] | None",
) -> "Iterator[tuple[str, torch.Tensor]]":
    rows, dtype = _read_group(file, path, group, COLUMNS), _dtype(file)
    for i, name in enumerate(rows["sample_id"].to_pylist()):
        if wanted is not None and name not in wanted:
            continue
        row = {column: rows[column][i] for column in COLUMNS}
        expected = wanted[name] if isinstance(wanted, Mapping) else None
        fault = _fault(row, dtype, expected)
        if fault:
            raise _damaged(path, name, fault)
        n_tokens = row["n_tokens"].as_py()
        features = decode(_buffer(row["hi"]), _buffer(row["lo"]), n_tokens, dtype)
        if features.shape[1] != width:
            raise _damaged(path, name, f"they are {features.shape[1]} wide, not {width}")
        yield name, features


def _fault(row: Mapping[str, Any], dtype: str, expected: bytes | None = None) -> str | None:
    """What is wrong with the features of a row; None if they are as they were written."""
    hi, lo, n_tokens = _buffer(row["hi"]), _buffer(row["lo"]), row["n_tokens"].as_py()
    made_from = row["ids_digest"].as_py()
    if expected not in (None, made_from):
        return "they were made from other token ids"
    seed = _seed(row["sample_id"].as_py(), n_tokens, made_from)
    if _digest(seed, hi, lo) != row["digest"].as_py():
        return "their bytes are not those that were written for this sample"
    return None if is_finite(hi, lo, dtype) else "they are not finite"


def _top_fault(row: Mapping[str, Any]) -> str | None:
    seed = _seed(row["sample_id"].as_py(), row["n_tokens"].as_py(), row["ids_digest"].as_py())
    found = _digest(seed, _values(row["top_ids"]), _values(row["top_logprobs"]))[:4]
    if found != row["top_digest"].as_py():
        return "their log-probabilities are not those that were written for this sample"
    return None


def _seed(sample_id: str, n_tokens: int, made_from: bytes) -> int:
    return zlib.crc32(made_from, zlib.crc32(f"{sample_id} {n_tokens}".encode()))


def _digest(seed: int, first: Any, second: Any) -> bytes:
    """Two chained CRC-32, the fastest digest of the standard library. It finds damage; it is no
    protection against an attack.
    """
    one = zlib.crc32(first, seed)
    return struct.pack("<II", zlib.crc32(second, one), one)


def _open(path: Path) -> pq.ParquetFile:
    """Open a shard. It may be gone since it was listed: `flywheel harvest` removes damaged ones."""
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: cannot be read ({error}); {_AGAIN}") from error


def _dtype(file: pq.ParquetFile) -> str:
    """The dtype that a shard names in its metadata."""
    return (file.schema_arrow.metadata or {}).get(b"dtype", b"missing").decode()


def _read_group(file: pq.ParquetFile, path: Path, group: int, columns: list[str]) -> pa.Table:
    try:
        return file.read_row_group(group, columns)
    except (OSError, pa.ArrowInvalid) as error:
        _mark(path)
        raise ValueError(f"{path}: cannot be read ({error}); {_AGAIN}") from error


def _damaged(path: Path, sample_id: str, fault: str) -> ValueError:
    _mark(path)
    return ValueError(f"{path}: features of sample {sample_id} are damaged: {fault}; {_AGAIN}")


def _mark(path: Path) -> None:
    """Touch the file, so that harvest checks it: it skips files of unchanged size and time
    (store/shard_repair.py).
    """
    with suppress(OSError):  # read-only for this process: harvest would report that too
        path.touch()


_AGAIN = "run `flywheel harvest`: it computes damaged features again"


def _bytes(group: "dict[str, torch.Tensor]") -> int:
    return sum(features.nbytes for features in group.values())


def _values(scalar: pa.Scalar) -> np.ndarray:
    return scalar.values.to_numpy()  # pyright: ignore[reportAttributeAccessIssue]


def _buffer(scalar: pa.Scalar) -> bytes:
    return scalar.as_buffer()  # pyright: ignore[reportAttributeAccessIssue]
