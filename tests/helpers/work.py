"""Tiny work folders for jobs: a random target and its traffic, up to its features or drafters."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import ScalingConfig

from dflash.checkpoint import save_drafter
from dflash.decode import decode
from dflash.model import new_drafter
from dflash.sampling import GREEDY, Sampling
from dflash.target_model import load_borrowed, load_target
from dflash.training_step import generator
from dflash.vocabulary import set_vocabulary
from jobs import harvest, ingest, select
from jobs.base.config import Config, load
from jobs.base.drafter_shape import drafter_config
from jobs.dataset.samples import load_requests
from jobs.training import ray_trainer
from tests.helpers.tiny import add_tokenizer, learn, make_target, memorise

NUM_REQUESTS = 48
SETTINGS = [
    "drafter.num_taps=3",
    "drafter.block_size=5",
    "drafter.mask_token_id=96",
    "drafter.draft_vocab=80",
    "harvest.samples_per_shard=20",
    "ingest.val_percent=15",
    "ingest.test_percent=15",
    "train.steps=12",
    "train.val_every=4",
    "train.checkpoint_every=4",
    "target.dtype=float32",
]


def prepare(cfg: Config) -> None:
    """Capture to features."""
    ingest.run(cfg)
    select.run(cfg)
    harvest.run(cfg)


def configure(folder: Path | str, *more: str) -> Config:
    """The settings of a tiny run in `folder`."""
    return load(None, [f"work={folder}", *SETTINGS, *more])


@contextmanager
def in_one_process() -> Iterator[None]:
    """`train` with one worker runs in this process, as Ray Train itself offers, in a second instead
    of 20: for tests of what a run learns. Those of how it is executed have real workers.
    """
    real = ray_trainer.scaling
    with pytest.MonkeyPatch.context() as patch:
        local = ScalingConfig(num_workers=0)
        patch.setattr(ray_trainer, "scaling", lambda c: local if c.train.workers == 1 else real(c))
        yield


def make_base(cfg: Config, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random drafter of the configured shape to start from, as an earlier run would export it."""
    drafter = new_drafter(drafter_config(cfg), 7)
    set_vocabulary(drafter, load_borrowed(cfg.target_path, torch.float32)[1], torch.arange(5, 85))
    return save_drafter(drafter, folder, dtype)


def make_work(folder: Path) -> Path:
    """Fill `folder`: target/, capture/, traffic/ and features/. Needs a Ray cluster."""
    make_target(folder / "target")
    target = load_target(folder / "target", torch.float32)
    (folder / "capture").mkdir()
    with open(folder / "capture" / "log.jsonl", "w") as log:
        for i in range(NUM_REQUESTS):
            prompt = torch.randint(1, 90, (4 + i % 5,), generator=generator("loop", i)).tolist()
            answer = decode(target, prompt, 20, [0])
            log.write(json.dumps(record(i, prompt, answer.output_ids)) + "\n")
    cfg = configure(folder)
    prepare(cfg)
    return folder


def record(i: int, prompt: list[int], output: list[int]) -> dict[str, Any]:
    """A line as the capture writes it; two domains take turns."""
    return {
        "v": 1,
        "captured_at": "2026-01-02T03:04:05Z",
        "request_id": f"r{i}",
        "prompt_ids": prompt,
        "output_ids": output,
        "finish_reason": "length",
        "temperature": 0.0,
        "conversation_id": f"c{i}",
        "domain": "ab"[i % 2],
    }


RIVAL_PROMPTS = [[5 + i, 9, 20 + i, 7] for i in range(16)]
RIVAL_SETTINGS = [
    "drafter.num_taps=3",
    "drafter.block_size=5",
    "drafter.mask_token_id=96",
    "ingest.val_percent=0",
    "ingest.test_percent=99",
    "target.dtype=float32",
    "evaluate.bootstrap=200",
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} w9 {% endfor %}"


def make_rivals(folder: Path, length: int = 20) -> Path:
    """Greedy and sampled traffic of a tiny target, harvested, and two drafters: drafters/known
    knows it, blank is random. Needs a Ray cluster.
    """
    make_target(folder / "target")
    add_tokenizer(folder / "target", 97, TEMPLATE)
    target = load_target(folder / "target", torch.float32)
    (folder / "capture").mkdir()
    with open(folder / "capture" / "log.jsonl", "w") as log:
        for i, prompt in enumerate(RIVAL_PROMPTS):
            sampling = Sampling(temperature=0.7) if i % 4 == 3 else GREEDY
            answer = decode(target, prompt, length, sampling=sampling, seed=i)
            more = {"temperature": sampling.temperature, "language": ["de", None][i % 2]}
            log.write(json.dumps(record(i, prompt, answer.output_ids) | more) + "\n")
    cfg = load(None, [f"work={folder}", *RIVAL_SETTINGS])
    prepare(cfg)
    known, blank = new_drafter(drafter_config(cfg), 0), new_drafter(drafter_config(cfg), 1)
    memorise(known, target, RIVAL_PROMPTS, length)
    save_drafter(known, folder / "drafters" / "known", torch.float32)
    save_drafter(blank, folder / "blank", torch.float32)
    return folder


CHAT_TEMPLATE = (
    "{% for m in messages %}w4 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w5"
    "{% if enable_thinking is defined and not enable_thinking %} w6{% endif %}{% endif %}"
)
CHAT_SETTINGS = [
    "drafter.num_taps=2",
    "drafter.block_size=4",
    "drafter.mask_token_id=96",
    "ingest.test_percent=40",
    "target.dtype=float32",
    "serve.max_model_len=500",
    "serve.kv_cache_gib=1",
]
CHAT_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
}


def make_chats(folder: Path) -> Path:
    """A target that vLLM serves, greedy chat traffic of it, harvested, and drafters/good, which
    knows the held-out answers by heart. Needs a Ray cluster.
    """
    add_tokenizer(make_target(folder / "target", **CHAT_SHAPE), 97, CHAT_TEMPLATE)
    target = load_target(folder / "target", torch.float32)
    (folder / "capture").mkdir()
    with open(folder / "capture" / "log.jsonl", "w") as log:
        for i in range(40):
            words = torch.randint(7, 90, (4 + i % 5,), generator=generator("preflight", i))
            prompt = [4, *words.tolist(), 5]
            answer = decode(target, prompt, 24, [1]).output_ids
            log.write(json.dumps(record(i, prompt, answer) | {"domain": "chat"}) + "\n")
    cfg = load(None, [f"work={folder}", *CHAT_SETTINGS])
    prepare(cfg)
    drafter = learn(drafter_config(cfg), target, load_requests(cfg, "test")[1], steps=70)
    save_drafter(drafter, folder / "drafters" / "good", torch.float32)
    return folder
