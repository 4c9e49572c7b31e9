"""The replays of an evaluation, and facts about its samples: leakage, and what can be drafted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from tqdm import tqdm

from dflash.model import Drafter, new_drafter
from dflash.replay import Replayable, replay, replay_many
from jobs.base.config import Config
from jobs.base.drafter_shape import drafter_config
from jobs.dataset.samples import CACHE_BYTES, selected, with_tokens
from jobs.dataset.slices import Row
from jobs.evaluation.drafters import (
    Borrowed,
    Side,
    load_on,
)
from jobs.training.runs import learned
from store.leakage import leaking
from store.schemas import TRAFFIC
from store.traffic_table import tokens_of

PROMPT = ("prompt_ids",)


def leaks(cfg: Config, rows: list[Row], sides: Sequence[Side]) -> dict[str, int]:
    """How many of the held-out rows share their text with what these drafters may have learned: the
    train split, and samples that a run trained on before a later log moved them to another split.
    """
    names = [*(side.folder.name for side in sides), Path(cfg.train.base).name]
    pinned = set().union(*(learned(cfg, name) for name in names if name))
    mine = pa.array(sorted(pinned), pa.string())
    train = (pc.field("split") == "train") | pc.field("sample_id").isin(mine)
    chosen = selected(cfg).filter(train)
    batches = [*with_tokens(cfg, chosen, PROMPT)]
    if gone := pinned.difference(chosen["sample_id"].to_pylist()):  # from a later selection
        batches += tokens_of(cfg.table("traffic"), sorted(gone), PROMPT)
    schema = pa.schema([TRAFFIC.field(name) for name in ("sample_id", *PROMPT)])
    asked = [{name: row[name] for name in schema.names} for row in rows]
    known = leaking(
        pa.Table.from_batches(batches, schema), pa.Table.from_pylist(asked, schema=schema)
    )
    return {"leaking": len(known), "samples": len(rows)}


def draftable(drafter: Drafter, head: Tensor, requests: Sequence[Replayable]) -> float:
    """Share of the answers' tokens that are in the drafter's vocabulary. First tokens do not count:
    they come from the prefill.
    """
    tokens = torch.cat([r.ids[r.num_prompt + 1 :] for r in requests])
    return float(torch.isin(tokens, drafter.draft_head(head)[0].cpu()).double().mean())


def replay_all(
    drafter: Drafter, borrowed: Borrowed, requests: Sequence[Replayable]
) -> dict[int, list[list[int]]]:
    """Walks for every K from 1 to block_size - 1.

    K drafts are served as a block of K + 1 slots, so this is every smaller block size, too.
    Requests are replayed in parts whose features fit into memory together, so each is read once.
    """
    ks = range(1, drafter.cfg.num_drafts + 1)
    width = 2 * len(drafter.cfg.target_layer_ids) * drafter.cfg.hidden_size
    walks: dict[int, list[list[int]]] = {k: [] for k in ks}
    with tqdm(total=len(requests), desc="replay", unit="request") as bar:
        for part in parts([width * len(r.ids) for r in requests], CACHE_BYTES):
            some = [requests[i] for i in part]
            found = replay_many(drafter, *borrowed, some, ks, progress=bar.update)
            for k in ks:
                walks[k] += found[k]
    return walks


def parts(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Successive ranges of indices whose sizes add up to at most `most`, or single ones."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield range(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def untrained_walks(cfg: Config, requests: Sequence[Replayable], k: int) -> list[list[int]]:
    """Walks of an untrained drafter of the configured shape: where the loop starts."""
    borrowed = load_on(cfg)
    drafter = new_drafter(replace(drafter_config(cfg), draft_vocab_size=0), cfg.train.seed)
    return replay(drafter.to(borrowed[0]), *borrowed, requests, k)
