"""Shards of the feature cache: Parquet objects named after their bytes, read by row groups.

    features/<cache key>/<sha256 of its bytes>.parquet
    features/<cache key>/.damaged/<name>    a reader found damage in this shard: harvest looks at it

A shard is written in one step and never changed. Computed again on another machine, its numbers
differ by rounding, so it gets another name. A late writer can only write what is there. Which
samples are where is said by the table feature_index (store/feature_index.py): what it does not list
is never read.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
import pyarrow as pa
import pyarrow.parquet as pq

from store.feature_codec import DTYPES, decode
from store.features import as_bytes, feature_fault, top_fault
from store.place import Found, Place, first_line
from store.schemas import FEATURE_INDEX

if TYPE_CHECKING:
    import torch

ROW_GROUP_BYTES = 4 << 20
"""Of a row group, uncompressed; it has one sample at least. Who wants one sample reads all of its
row group. Smaller ones gain little: on a bucket, each costs 10 ms more.
"""
MARKS = ".damaged"
COLUMNS = ["sample_id", "n_tokens", "ids_digest", "hi", "lo", "digest"]
TOP_COLUMNS = ["sample_id", "n_tokens", "ids_digest", "top_ids", "top_logprobs", "top_digest"]
T = TypeVar("T")
Listed = tuple[str, int, int]
"""Sample id, tokens, row group."""


def write_shard(place: Place, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Write FEATURES rows as one shard below `place`, which is named after the cache key; returns
    its rows of FEATURE_INDEX, which nobody has listed yet. Nothing is written for no rows.

    One row group of `rows`, which may be a generator, is in memory at a time, and the compressed
    shard. Raises OSError (disk full, no access).
    """
    sink, found = pa.BufferOutputStream(), list[Listed]()
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["sample_id"],  # tensor bytes do not repeat # pyright: ignore[reportArgumentType]
    ) as writer:
        for number, group in enumerate(_groups(rows)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            found += [(row["sample_id"], row["n_tokens"], number) for row in group]
    if not found:
        return FEATURE_INDEX.empty_table()
    data = memoryview(sink.getvalue()).cast("B")
    name = f"{hashlib.sha256(data).hexdigest()[:32]}.parquet"
    # An object of that name that has other bytes is damaged.
    if not place.create(name, obstore.Bytes(data)) and place.read(name) != data:
        place.write(name, obstore.Bytes(data))
    there = place.head(name)
    if there is None:
        raise FileNotFoundError(f"{place}/{name} was deleted as soon as it was written; run again")
    return index_rows(place.name, there, found, datetime.now(UTC))


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group, size = [], 0
    for row in rows:
        more = len(row["hi"]) + len(row["lo"])
        if group and size + more > ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(row)
        size += more
    if group:
        yield group


def index_rows(key: str, shard: Found, samples: Collection[Listed], when: datetime) -> pa.Table:
    """FEATURE_INDEX rows of samples of a shard below the cache key `key`."""
    made = {
        "features_key": key,
        "file": shard.name,
        "file_bytes": shard.size,
        "e_tag": shard.e_tag,
        "harvested_at": when,
    }
    names = ("sample_id", "n_tokens", "row_group")
    rows = [made | dict(zip(names, sample, strict=True)) for sample in samples]
    return pa.Table.from_pylist(rows, schema=FEATURE_INDEX)


def open_shard(place: Place, name: str, schema: pa.Schema) -> pq.FileMetaData:
    """The footer of a shard of the cache that `store.schemas.features_schema` describes, in any
    known dtype: caches of another dtype are in another folder.

    Raises ValueError for any other object: training on wrong features would give no other warning.
    """
    footer = _reading(place, name, lambda: pq.read_metadata(place.open(name)))
    found = footer.metadata or {}
    dtype = dtype_of(footer)
    dtype = dtype if dtype in DTYPES.values() else " or ".join(DTYPES.values())
    wanted = schema.metadata | {b"dtype": dtype.encode()}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ValueError(
                f"{place}/{name}: {key.decode()} is {found.get(key, b'missing').decode()!r}, "
                f"expected {value.decode()!r}; harvest again"
            )
    return footer


def dtype_of(footer: pq.FileMetaData) -> str:
    """The dtype that a shard names in its metadata."""
    return (footer.metadata or {}).get(b"dtype", b"missing").decode()


def read_group(
    place: Place, name: str, footer: pq.FileMetaData, group: int, columns: list[str]
) -> pa.Table:
    """Columns of a row group. Raises Damaged if the shard is damaged or gone, and OSError if the
    store does not answer.
    """

    def read() -> pa.Table:
        file = pq.ParquetFile(place.open(name), metadata=footer, pre_buffer=True)
        return file.read_row_group(group, columns)

    return _reading(place, name, read)


def listed(place: Place, name: str, footer: pq.FileMetaData) -> list[Listed]:
    """Every sample of a shard. Raises as `read_group`."""
    found = []
    for group in range(footer.num_row_groups):
        rows = read_group(place, name, footer, group, ["sample_id", "n_tokens"])
        pairs = zip(rows["sample_id"].to_pylist(), rows["n_tokens"].to_pylist(), strict=True)
        found += [(sample, tokens, group) for sample, tokens in pairs]
    return found


def find_faults(place: Place, name: str, footer: pq.FileMetaData) -> dict[str, str]:
    """{sample_id: what is wrong} of every damaged row. Raises as `read_group`."""
    faults: dict[str, str] = {}
    there = footer.schema.to_arrow_schema().names
    names = [column for column in [*COLUMNS, *TOP_COLUMNS[3:]] if column in there]
    for group in range(footer.num_row_groups):
        rows = read_group(place, name, footer, group, names)
        for i in range(rows.num_rows):
            row = {column: rows[column][i] for column in names}
            fault = feature_fault(row, dtype_of(footer)) or ("top_ids" in row and top_fault(row))
            if fault:
                faults[row["sample_id"].as_py()] = fault
    return faults


def features_of(
    place: Place,
    name: str,
    row: Mapping[str, pa.Scalar],
    dtype: str,
    width: int,
    made_from: bytes | None = None,
) -> "torch.Tensor":
    """bf16 [T, width] of a row (COLUMNS) of a shard of this dtype. made_from: the `ids_digest` that
    it must have; None: any. Raises Damaged.
    """
    fault = feature_fault(row, dtype, made_from)
    if not fault:
        columns = as_bytes(row["hi"]), as_bytes(row["lo"])
        features = decode(*columns, row["n_tokens"].as_py(), dtype)
        if features.shape[1] == width:
            return features
        fault = f"they are {features.shape[1]} wide, not {width}"
    raise row_damaged(place, name, row["sample_id"].as_py(), fault)


class Damaged(ValueError):
    """A shard, or a row of it, is not as it was written. `name`: of the shard."""

    def __init__(self, place: Place, name: str, fault: str):
        super().__init__(
            f"{place}/{name}: {fault}; run `flywheel harvest`: it computes damaged features again"
        )
        self.name = name


def row_damaged(place: Place, name: str, sample_id: str, fault: str) -> Damaged:
    """The error for a damaged row of a shard."""
    return Damaged(place, name, f"features of sample {sample_id} are damaged: {fault}")


@contextmanager
def marking(place: Place) -> Iterator[None]:
    """For readers: a shard that is found Damaged in the block is marked, so that harvest checks it.
    Of the others it looks at size and e_tag only (store/shard_repair.py).
    """
    try:
        yield
    except Damaged as error:
        with suppress(OSError):  # read-only for this process: the error that it raises says enough
            place.create(f"{MARKS}/{error.name}", b"")
        raise


def _reading(place: Place, name: str, read: Callable[[], T]) -> T:
    """read(), tried again if the store did not answer for a moment. It may be gone since it was
    listed, and it may be damaged.
    """
    for last in (False, True):
        try:
            return read()
        except (OSError, pa.ArrowInvalid) as error:
            there = place.head(name)  # raises what is wrong with the store, if it is the store
            if last or not there:
                raise Damaged(place, name, f"cannot be read ({first_line(error)})") from error
    raise AssertionError("not reached")
