"""A work folder in the layout of releases before tables, made from one of today."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.base.config import Config
from store.ids import short_hash
from store.schemas import ACCEPTANCE, REJECTS, SET_ASIDE, TRAFFIC

NEW = ("log", "prompt_tokens", "output_tokens", "prompt_id", "repeat_count", "batch")
RULES = {"target_id": "t", "vocab_size": 97}


def write_shard(folder: Path, name: str, rows: pa.Table) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, folder / name, compression="zstd")
    return {"file": name, "rows": len(rows), "bytes": (folder / name).stat().st_size}


def write_manifest(folder: Path, key: str, files: list[dict[str, Any]], **more: Any) -> None:
    """more: inputs, detail, replaces."""
    manifest = {"key": key, "files": files, "inputs": {}, "detail": {}, "replaces": []} | more
    (folder / "manifests").mkdir(parents=True, exist_ok=True)
    (folder / "manifests" / f"{key}.json").write_text(json.dumps(manifest))


def former_columns(schema: pa.Schema, but: tuple[str, ...] = NEW) -> list[str]:
    kept = ("repeat_count",) if schema is TRAFFIC else ()
    return [name for name in schema.names if name not in but or name in kept]


def write_log(work: Path, key: str, rows: pa.Table, rejects: pa.Table, **more: Any) -> None:
    """A log's samples and rejects, as ingest published them. more: of its manifest in traffic/."""
    inputs = {"bytes": 10, "sha256": f"sha-{key}", "rules": RULES, "reading": 3}
    counts = {"records": len(rows) + len(rejects), "accepted": len(rows)}
    good = write_shard(
        work / "traffic", f"{key}-00000.parquet", rows.select(former_columns(TRAFFIC))
    )
    bad = write_shard(work / "rejects", f"{key}-00000.parquet", rejects.select(REJECTS.names[1:]))
    examples = {"counts": counts, "names": {"model:m": 1}, "examples": {"cut": f"{key}:0"}}
    write_manifest(
        work / "rejects", key, [bad], inputs=inputs, detail={**examples, "traffic": [good]}
    )
    name = short_hash([key, more]) if more else key
    detail = {"work": key, "log": f"/logs/{key}.jsonl", "counts": counts}
    write_manifest(work / "traffic", name, [good], inputs=inputs, detail=detail, **more)


def write_acceptance(work: Path, inputs: dict[str, Any], rows: pa.Table, **more: Any) -> str:
    """Acceptance rows of these inputs; returns the key of their manifest."""
    rows = rows.select(former_columns(ACCEPTANCE))
    for name in ("accepted", "drafted"):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, name, rows[name].cast(pa.list_(pa.uint8())))
    key = short_hash([inputs, len(rows), more])
    shard = write_shard(work / "acceptance", f"{key}.parquet", rows)
    write_manifest(work / "acceptance", key, [shard], inputs=inputs, **more)
    return key


def write_set_aside(work: Path, rows: pa.Table) -> None:
    columns = former_columns(SET_ASIDE, ("backend", "dtype"))
    shard = write_shard(work / "set_aside", "aside.parquet", rows.select(columns))
    write_manifest(work / "set_aside", "aside", [shard])


def make_former(cfg: Config, work: Path) -> None:
    """Fill `work` with the target, traffic and features of another folder, in the former layout."""
    shutil.copytree(cfg.target_path, work / "target")
    traffic = cfg.table("traffic").read()
    half = len(traffic) // 2
    for key, rows in (("aaaa", traffic.slice(0, half)), ("bbbb", traffic.slice(half))):
        write_log(work, key, rows, REJECTS.empty_table())
    index = cfg.table("feature_index").read()
    for key in index["features_key"].unique().to_pylist():
        shutil.copytree(cfg.place("features", key).path, work / "features" / key)
        files = [{"file": name} for name in index["file"].unique().to_pylist()]
        write_manifest(work / "features" / key, "made", files)
        (work / "features" / key / "seen.json").write_text("{}")
