"""Selected samples, and a harvest of them without Ray, ingest and select."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import torch

from dflash.identity import target_id
from dflash.target_model import Target
from jobs import harvest
from jobs.base.config import Config
from jobs.dataset import samples
from jobs.harvesting import harvester
from store.ids import sample_id
from store.schemas import SELECTION, TRAFFIC
from tests.helpers.tiny import greedy_answers
from tests.helpers.work import record

NUM = 24
"""Samples of a test."""


def write_selected(cfg: Config, records: list[dict[str, Any]]) -> list[str]:
    """Add capture records (tests.helpers.work.record) to traffic/ and selection/, all for training;
    returns their sample ids.
    """
    identity = target_id(cfg.target_path)
    rows = []
    for i, line in enumerate(records):
        shaped = line.get("shaped")
        end = len(line["prompt_ids"]) + len(line["output_ids"])
        rows.append(
            {
                "sample_id": sample_id(identity, line["prompt_ids"], line["output_ids"]),
                "conversation_id": line["conversation_id"],
                "split": "train",
                "domain": line["domain"],
                "captured_at": datetime(2026, 1, 2, 3, 4, i % 60, tzinfo=UTC),
                "target_id": identity,
                "prompt_ids": line["prompt_ids"],
                "output_ids": line["output_ids"],
                "loss_mask": [{"start": len(line["prompt_ids"]), "end": end}],
                "temperature": line["temperature"],
                "shaped": None if shaped is None else ",".join(shaped),
                "prompt_tokens": len(line["prompt_ids"]),
                "output_tokens": len(line["output_ids"]),
                "repeat_count": 1,
                "request_id": line["request_id"],
            }
        )
    rows = list({row["sample_id"]: row for row in rows}.values())
    for name, schema in (("traffic", TRAFFIC), ("selection", SELECTION)):
        columns = [{key: row.get(key) for key in schema.names} for row in rows]
        cfg.table(name).append(pa.Table.from_pylist(columns, schema=schema))
    return [row["sample_id"] for row in rows]


def here(cfg, place, chunks, num_chunks):
    """As jobs.harvesting.actors.by_actors, without Ray: an actor takes seconds to start."""
    worker = harvester.Harvester(cfg, 1)
    for chunk in chunks:
        yield worker.shard(place, chunk)


def prompts_of(num, seed=3):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(1, 90, (num, 6), generator=drawn).tolist()


def plain(own: Target, num: int = NUM, first: int = 0):
    """Capture records of the target's greedy answers."""
    prompts = prompts_of(first + num)[first:]
    answers = greedy_answers(own, prompts, 20)
    return [record(first + i, *pair) for i, pair in enumerate(zip(prompts, answers, strict=True))]


def listed(cfg):
    """Rows of the feature index, without where the files are on the disk."""
    columns = ["sample_id", "n_tokens", "file", "row_group"]
    return cfg.table("feature_index").read(columns).sort_by("sample_id").to_pylist()


def run(cfg, records):
    """Select these records, too, and harvest."""
    write_selected(cfg, records)
    return harvest.run(cfg)


def all_rows(cfg):
    """Every sample with its tokens."""
    return [row for split in ("train", "val", "test") for row in samples.load_rows(cfg, split)]
