"""The products of a former work folder as rows of today's tables, and its pins.

Each function can be run again at any time: it then writes what is there already.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.base.config import Config
from jobs.training.runs import PINNED, VERSIONS
from jobs.upkeep.pins import FORMER
from store.former_layout import (
    Manifest,
    files_in_force,
    manifests_in_force,
    read_former,
    read_record,
)
from store.ids import prompt_id, short_hash
from store.schemas import (
    ACCEPTANCE,
    FEATURE_INDEX,
    LOGS,
    PROMOTIONS,
    REJECTS,
    SELECTION,
    SET_ASIDE,
    TRAFFIC,
)
from store.table_shards import Shard

Completed = Callable[[pa.Table, Manifest], pa.Table]


def move_rejects(cfg: Config) -> int:
    """Copy rejects/; returns the number of rows, as the other functions do."""
    return _moved(cfg, "rejects", REJECTS, "log", _of_log)


def move_traffic(cfg: Config) -> int:
    """Copy traffic/, and what is known of its logs."""
    rows = _moved(cfg, "traffic", TRAFFIC, "log", _of_traffic)
    found = [manifests_in_force(cfg.place(name).path) for name in ("rejects", "traffic")]
    if logs := _logs(*found):
        table = cfg.table("logs")
        shard = table.write(pa.Table.from_pylist(logs, schema=LOGS))
        table.replace("log", [row["log"] for row in logs], [shard])
    return rows


def move_set_aside(cfg: Config) -> int:
    """Copy set_aside/."""
    return _moved(cfg, "set_aside", SET_ASIDE, "features_key", lambda rows, _: rows)


def move_acceptance(cfg: Config) -> int:
    """Copy acceptance/. Former rows did not say how often traffic has a sample: once is noted."""

    def completed(rows: pa.Table, manifest: Manifest) -> pa.Table:
        return _with(rows, repeat_count=1, batch=short_hash(manifest.inputs))

    return _moved(cfg, "acceptance", ACCEPTANCE, "batch", completed)


def _moved(cfg: Config, name: str, schema: pa.Schema, column: str, completed: Completed) -> int:
    """Write the shards of a folder as shards of the table `name`, in one commit; returns the rows.

    completed(rows, manifest) fills the columns that the former rows lack. `column` decides what is
    replaced if this is done again.
    """
    table, folder = cfg.table(name), cfg.place(name).path
    shards: list[Shard] = []
    keys: set[Any] = set()
    for file, manifest in files_in_force(folder).items():
        rows = completed(read_former(folder / file, schema), manifest)
        if len(rows):
            keys.update(rows[column].unique().to_pylist())
            shards.append(table.write(rows))
    if shards:
        table.replace(column, sorted(keys), shards)
    return sum(shard.rows for shard in shards)


def _with(rows: pa.Table, **columns: Any) -> pa.Table:
    """Rows with these columns set: to one value, or to an array."""
    for name, value in columns.items():
        place = rows.schema.get_field_index(name)
        kind = rows.schema.field(name).type
        if not isinstance(value, pa.Array | pa.ChunkedArray):
            value = pa.repeat(pa.scalar(value, kind), len(rows))
        rows = rows.set_column(place, rows.schema.field(name), value.cast(kind))
    return rows


def _of_log(rows: pa.Table, manifest: Manifest) -> pa.Table:
    return _with(rows, log=manifest.work)


def _of_traffic(rows: pa.Table, manifest: Manifest) -> pa.Table:
    prompts = rows["prompt_ids"].combine_chunks()
    starts, ids = prompts.offsets.to_numpy(), prompts.values.to_numpy()
    names = [prompt_id(ids[a:b]) for a, b in pairwise(starts)]
    return _with(
        rows,
        log=manifest.work,
        prompt_tokens=pc.list_value_length(rows["prompt_ids"]),  # pyright: ignore[reportAttributeAccessIssue]
        output_tokens=pc.list_value_length(rows["output_ids"]),  # pyright: ignore[reportAttributeAccessIssue]
        prompt_id=pa.array(names, pa.string()),
    )


def _logs(rejects: list[Manifest], traffic: list[Manifest]) -> list[dict[str, Any]]:
    """LOGS rows. The manifest of a log in rejects/ has the counts, that in traffic/ the path."""
    found: dict[str, dict[str, Any]] = {}
    for manifest in (*rejects, *traffic):
        inputs, detail = manifest.inputs, manifest.detail
        if "rules" not in inputs:
            continue
        row = found.setdefault(manifest.work, {"names": "{}", "examples": "{}", "counts": "{}"})
        row |= {"log": manifest.work, "target_id": inputs["rules"]["target_id"]}
        row |= {name: inputs.get(name) for name in ("bytes", "sha256")}
        row |= {"rules": json.dumps(inputs["rules"], sort_keys=True)}
        row |= {"reading": inputs.get("reading", 0), "path": detail.get("log", row.get("path", ""))}
        row |= {n: json.dumps(detail[n]) for n in ("counts", "names", "examples") if n in detail}
        row |= {"ingested_at": datetime.fromtimestamp(manifest.path.stat().st_mtime, UTC)}
    return [found[key] for key in sorted(found)]


def move_promotions(cfg: Config) -> int:
    """Copy the numbered decisions of promotions/."""
    rows = []
    for path in sorted(cfg.place("promotions").path.glob("[0-9]*.json")):
        record = read_record(path, ["number", "decided_at", "action"])
        record["decided_at"] = datetime.fromisoformat(record["decided_at"])
        rows.append(record | {"evidence": json.dumps(record.get("evidence"))})
    if rows:
        table = cfg.table("promotions")
        shard = table.write(pa.Table.from_pylist(rows, schema=PROMOTIONS))
        table.replace("number", [row["number"] for row in rows], [shard])
    return len(rows)


def move_features(cfg: Config) -> int:
    """List the files of the feature cache in feature_index; the files stay as they are. What cannot
    be read is not listed, so it is harvested again.
    """
    found = []
    for folder in sorted(cfg.place("features").path.glob("*/manifests")):
        key = folder.parent.name
        for name in files_in_force(folder.parent):
            found += _index_rows(cfg, key, name)
    if found:
        table = cfg.table("feature_index")
        shard = table.write(pa.Table.from_pylist(found, schema=FEATURE_INDEX))
        table.replace("file", sorted({row["file"] for row in found}), [shard])
    return len(found)


def _index_rows(cfg: Config, key: str, name: str) -> list[dict[str, Any]]:
    place = cfg.place("features", key)
    there = place.head(name)
    if there is None:
        return []
    try:
        file = pq.ParquetFile(place.open(name))
        groups = range(file.num_row_groups)
        tables = [file.read_row_group(i, ["sample_id", "n_tokens"]).to_pylist() for i in groups]
    except (OSError, pa.ArrowInvalid):
        return []
    made = {"features_key": key, "file": name, "file_bytes": there.size, "e_tag": there.e_tag}
    made |= {"harvested_at": there.modified}
    return [row | made | {"row_group": i} for i, rows in enumerate(tables) for row in rows]


def move_pins(cfg: Config) -> int:
    """Write the pins of training runs as Parquet, so that it stays known what a drafter learned
    from. Their runs cannot go on: a run's name now follows from other columns.
    """
    paths = sorted(cfg.place("runs").path.glob("*/pin-*.json"))
    for path in paths:
        pin = read_record(path, ["train", "val"])
        rows = [_pinned(row, split) for split in ("train", "val") for row in pin[split]]
        schema = pa.schema([SELECTION.field(name) for name in PINNED])
        table = pa.Table.from_pylist(rows, schema=schema).sort_by("sample_id")
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({VERSIONS: b"{}"}), sink, compression="zstd")
        file = f"{FORMER}{path.stem.removeprefix('pin-')}.parquet"
        cfg.place("runs", path.parent.name).write(file, sink.getvalue().to_pybytes())
    return len(paths)


def _pinned(row: list[Any], split: str) -> dict[str, Any]:
    name, domain, temperature, spans = row
    mask = [{"start": start, "end": end} for start, end in spans]
    found = {"sample_id": name, "split": split, "domain": domain, "temperature": temperature}
    return found | {"loss_mask": mask}
