"""A target as the large tied ones are published, in shards without a head, through the loop."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash.decode import decode
from dflash.target_model import load_target
from dflash.training_step import generator
from jobs import evaluate, train
from tests.helpers.tiny import make_target
from tests.helpers.work import configure, prepare, record


@pytest.mark.usefixtures("one_process")
def test_a_sharded_tied_target_goes_through_every_stage(tmp_path, ray_cluster):
    """Ingest accepted it; harvest ended with: no such file, model.safetensors."""
    folder = make_target(tmp_path / "whole", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "target", max_shard_size="20KB")
    target = load_target(tmp_path / "target", torch.bfloat16)
    (tmp_path / "capture").mkdir()
    with open(tmp_path / "capture" / "log.jsonl", "w") as log:
        for i in range(40):
            prompt = torch.randint(1, 90, (4,), generator=generator("sharded", i)).tolist()
            log.write(json.dumps(record(i, prompt, decode(target, prompt, 16).output_ids)) + "\n")
    words = ["target.dtype=bfloat16", "train.steps=2", "train.val_every=2"]
    cfg = configure(tmp_path, *words, "train.checkpoint_every=2")
    prepare(cfg)
    train.run(cfg)
    assert evaluate.run(cfg)["tau"]["pooled"] >= 1.0
