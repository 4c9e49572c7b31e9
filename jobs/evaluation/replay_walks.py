"""The replays of an evaluation, and facts about its samples: leakage, and what can be drafted."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from tqdm import tqdm

from dflash.model import Drafter, new_drafter
from dflash.replay import Request, replay, replay_many
from jobs.base.config import Config
from jobs.base.drafter_shape import drafter_config
from jobs.dataset.slices import Row
from jobs.evaluation.drafters import (
    Borrowed,
    Side,
    load_on,
)
from jobs.training.runs import learned
from store.leakage import leaking
from store.traffic_table import read_traffic


def leaks(cfg: Config, identity: str, rows: list[Row], sides: Sequence[Side]) -> dict[str, int]:
    """How many of the held-out rows share their text with what these drafters may have learned: the
    train split, and samples that a run trained on before a later log moved them to another split.
    """
    names = [*(side.folder.name for side in sides), Path(cfg.train.base).name]
    pinned = pa.array(sorted(set().union(*(learned(cfg, n) for n in names if n))), pa.string())
    table = read_traffic(cfg.path("traffic"), identity)
    train = table.filter((pc.field("split") == "train") | pc.field("sample_id").isin(pinned))
    asked = table.filter(pc.field("split") == cfg.evaluate.split)
    known = leaking(train, asked) & {row["sample_id"] for row in rows}
    return {"leaking": len(known), "samples": len(rows)}


def draftable(drafter: Drafter, head: Tensor, requests: Sequence[Request]) -> float:
    """Share of the answers' tokens that are in the drafter's vocabulary. First tokens do not count:
    they come from the prefill.
    """
    tokens = torch.cat([r.ids[r.num_prompt + 1 :] for r in requests])
    return float(torch.isin(tokens, drafter.draft_head(head)[0].cpu()).double().mean())


def replay_all(
    drafter: Drafter, borrowed: Borrowed, requests: list[Request]
) -> dict[int, list[list[int]]]:
    """Walks for every K from 1 to block_size - 1.

    K drafts are served as a block of K + 1 slots, so this is every smaller block size, too.
    """
    ks = range(1, drafter.cfg.num_drafts + 1)
    with tqdm(total=len(requests), desc="replay", unit="request") as bar:
        return replay_many(drafter, *borrowed, requests, ks, progress=bar.update)


def untrained_walks(cfg: Config, requests: list[Request], k: int) -> list[list[int]]:
    """Walks of an untrained drafter of the configured shape: where the loop starts."""
    borrowed = load_on(cfg)
    drafter = new_drafter(replace(drafter_config(cfg), draft_vocab_size=0), cfg.train.seed)
    return replay(drafter.to(borrowed[0]), *borrowed, requests, k)
