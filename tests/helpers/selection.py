"""Traffic and a selection of all of it, written without ingest and select."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from dflash.identity import target_id
from jobs.base.config import Config
from store.ids import sample_id
from store.schemas import SELECTION, TRAFFIC


def write_selected(cfg: Config, records: list[dict[str, Any]]) -> list[str]:
    """Add capture records (tests.helpers.work.record) to traffic/ and selection/, all for training;
    returns their sample ids.
    """
    identity = target_id(cfg.target_path)
    rows = []
    for i, record in enumerate(records):
        shaped = record.get("shaped")
        end = len(record["prompt_ids"]) + len(record["output_ids"])
        rows.append(
            {
                "sample_id": sample_id(identity, record["prompt_ids"], record["output_ids"]),
                "conversation_id": record["conversation_id"],
                "split": "train",
                "domain": record["domain"],
                "captured_at": datetime(2026, 1, 2, 3, 4, i % 60, tzinfo=UTC),
                "target_id": identity,
                "prompt_ids": record["prompt_ids"],
                "output_ids": record["output_ids"],
                "loss_mask": [{"start": len(record["prompt_ids"]), "end": end}],
                "temperature": record["temperature"],
                "shaped": None if shaped is None else ",".join(shaped),
                "prompt_tokens": len(record["prompt_ids"]),
                "output_tokens": len(record["output_ids"]),
                "repeat_count": 1,
                "request_id": record["request_id"],
            }
        )
    rows = list({row["sample_id"]: row for row in rows}.values())
    for name, schema in (("traffic", TRAFFIC), ("selection", SELECTION)):
        columns = [{key: row.get(key) for key in schema.names} for row in rows]
        cfg.table(name).append(pa.Table.from_pylist(columns, schema=schema))
    return [row["sample_id"] for row in rows]
