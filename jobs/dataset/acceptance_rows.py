"""Rows of acceptance/: made from walks (accepted drafts per round), published, and read again."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dflash.checkpoint import drafter_sha256, read_config
from dflash.identity import target_id
from dflash.model import Drafter
from jobs.base.config import Config
from jobs.dataset.slices import Row, Walks
from serving.client import Completion
from serving.vllm_counts import served_row
from store.ids import drafter_version, short_hash
from store.schemas import ACCEPTANCE


def commit_walks(
    cfg: Config,
    identity: str,
    folder: Path,
    drafter: Drafter,
    rows: list[Row],
    walks: dict[int, Walks],
) -> None:
    """Publish walks (K -> accepted drafts per round of each row) as rows of origin replay."""
    version = drafter_version(drafter_sha256(folder))
    now = datetime.now(UTC)
    found = [
        acceptance_row(row, rounds, k, drafter.cfg.block_size, "replay", version, identity, now)
        for k, walk in walks.items()
        for row, rounds in zip(rows, walk, strict=True)
    ]
    inputs = {"drafter_version": version, "origin": "replay", "split": cfg.evaluate.split}
    commit_rows(cfg, found, inputs)


def acceptance_row(
    row: Row,
    accepted: list[int],
    k: int,
    block_size: int,
    origin: str,
    version: str,
    identity: str,
    now: datetime,
) -> Row:
    """The ACCEPTANCE row of a traffic row; `accepted`: drafts accepted in each round."""
    return {
        "request_id": f"{origin}-{row['sample_id']}",
        "sample_id": row["sample_id"],
        "conversation_id": row["conversation_id"],
        "origin": origin,
        "drafter_version": version,
        "target_id": identity,
        "domain": row["domain"],
        "k": k,
        "block_size": block_size,
        "temperature": row["temperature"],
        "accepted": accepted,
        "drafted": [k] * len(accepted),
        "prompt_tokens": len(row["prompt_ids"]),
        "output_tokens": len(row["output_ids"]),
        "started_at": now,
        "finished_at": now,
        "replica": "",
        "repeat_count": row["repeat_count"],
    }


def commit_rows(cfg: Config, rows: list[Row], inputs: dict[str, Any]) -> None:
    """Publish acceptance rows in place of those with the same `inputs`, unless they are equal but
    for their times.
    """
    batch, table = short_hash(inputs), cfg.table("acceptance")
    made = pa.Table.from_pylist([row | {"batch": batch} for row in rows], schema=ACCEPTANCE)
    columns = [name for name in ACCEPTANCE.names if name not in ("started_at", "finished_at")]
    order = [(name, "ascending") for name in ("request_id", "target_id", "k")]
    known = table.read(columns, pc.field("batch") == batch)
    if not known.sort_by(order).equals(made.select(columns).sort_by(order)):
        table.replace("batch", [batch], [table.write(made)], inputs)


def stored_walks(cfg: Config, sha: str, rows: list[Row]) -> tuple[list[Row], dict[int, Walks]]:
    """Those of `rows` that `flywheel evaluate` replayed with this drafter; their walks at every K.

    Raises ValueError if there is none.
    """
    mine = (pc.field("drafter_version") == sha) & (pc.field("origin") == "replay")
    columns = ["sample_id", "k", "accepted"]
    found = cfg.table("acceptance").read(columns, mine).to_pylist()
    by_key = {(row["k"], row["sample_id"]): row["accepted"] for row in found}
    ks = sorted({k for k, _ in by_key})
    rows = [row for row in rows if ks and (ks[-1], row["sample_id"]) in by_key]
    if not rows:
        raise ValueError(f"drafter {sha} was not replayed on these samples: `flywheel evaluate`")
    return rows, {k: [by_key[k, row["sample_id"]] for row in rows] for k in ks}


def commit_served(
    cfg: Config, folder: Path, rows: list[Row], answers: list[Completion], replica: str
) -> None:
    """Publish the answers of a server with this drafter as acceptance rows of origin served."""
    version, identity = drafter_version(drafter_sha256(folder)), target_id(cfg.target_path)
    block_size = read_config(folder).block_size
    found = [
        served_row(
            answer,
            sample_id=row["sample_id"],
            conversation_id=row["conversation_id"],
            domain=row["domain"],
            target_id=identity,
            drafter_version=version,
            block_size=block_size,
            temperature=0.0,
            replica=replica,
        )
        | {"repeat_count": row["repeat_count"]}
        for row, answer in zip(rows, answers, strict=True)
    ]
    inputs = {"drafter_version": version, "origin": "served", "split": cfg.evaluate.split}
    commit_rows(cfg, found, inputs)
