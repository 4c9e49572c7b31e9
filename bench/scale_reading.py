"""The reading sides of harvest and of training alone, for bench/scale.py: without a target and
without steps.

    python -m bench.scale_reading harvest|training work=FOLDER ...
"""

import json
import sys
from datetime import UTC, datetime

import pyarrow as pa
import torch

from dflash.identity import target_id
from dflash.training_step import step_indices
from jobs.base.config import Config, load
from jobs.base.drafter_shape import drafter_config
from jobs.base.target_facts import target_config, target_taps
from jobs.dataset.samples import features_place, selected, with_tokens
from jobs.harvesting.missing_features import chunks_of
from jobs.training.feed import LazySamples, training_features, training_set
from jobs.training.runs import live_pin
from store.feature_shards import write_shard
from store.features import features_row
from store.schemas import features_schema

BATCH, STEPS = 8, 400


def read_for_harvest(cfg: Config) -> dict[str, float]:
    """Stream the selected samples in chunks as the actors get them; write random features of them,
    so that training has something to read.
    """
    rows, place = selected(cfg), features_place(cfg)
    hidden, taps = target_config(cfg)["hidden_size"], list(target_taps(cfg))
    schema = features_schema(target_id(cfg.target_path), taps, hidden)
    samples = tokens = 0
    for chunk in chunks_of(rows, with_tokens(cfg, rows), cfg.harvest.samples_per_shard):
        made = []
        for row in chunk.to_pylist():
            ids = [*row["prompt_ids"], *row["output_ids"]]
            features = torch.randn(len(ids), len(taps) * hidden).bfloat16()
            made.append(features_row(row["sample_id"], ids, features))
            tokens += len(ids)
        samples += len(made)
        cfg.table("feature_index").append(write_shard(place, schema, made))
    return {"samples": samples, "tokens": tokens, "at": datetime.now(UTC).timestamp()}


def read_for_training(cfg: Config) -> dict[str, float]:
    """Visit the samples of STEPS steps with their features, as one rank does."""
    pin = live_pin(cfg)
    data = training_set(cfg, pin, drafter_config(cfg).num_drafts)
    samples = LazySamples(data.samples, training_features(cfg, data))
    tokens = 0
    for step in range(STEPS):
        for _, i in step_indices(step, data.num_main, BATCH, cfg.train.seed):
            sample = samples[i]
            assert len(sample.features) == len(sample.ids)
            tokens += len(sample.ids)
    return {"samples": len(samples), "tokens": tokens}


if __name__ == "__main__":
    pa.set_cpu_count(2)
    what, *settings = sys.argv[1:]
    print(
        json.dumps(
            {"harvest": read_for_harvest, "training": read_for_training}[what](load(None, settings))
        )
    )
