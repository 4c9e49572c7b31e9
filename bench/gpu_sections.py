"""The sections of bench/gpu.py: what each one computes, on a GPU or, in tiny shapes, on a CPU.

Differences are norms of differences, relative to the norm of the second side. Seconds are medians.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed

from bench.gpu_worlds import (
    Shapes,
    World,
    attentive,
    distance,
    gradient,
    large_world,
    loss_of,
    products,
    small_world,
    train,
)
from dflash.batches import Batch
from dflash.checkpoint import cast
from dflash.decode import decode
from dflash.drafter_config import DrafterConfig
from dflash.frozen_head import FrozenHeadLoss
from dflash.mask import dense_mask, flex_mask
from dflash.model import Drafter, drafter_of, new_drafter
from dflash.optim import build_optimizers
from dflash.parallel import shard, sum_gradients, whole_weights
from dflash.replay import Request, draft_hidden, replay
from dflash.training_memory import activation_bytes, head_bytes, model_bytes

Found = dict[str, Any]

PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 FLOP/s as the vendor states them, by a word of the device's name."""

FEW_STEPS = 5
"""Of training that must be equal: Muon amplifies roundings from step to step."""


@contextmanager
def attending(make_mask: Callable[..., Any], device: str) -> Iterator[None]:
    """Every forward uses this kind of mask, with flex attention uncompiled on a CPU."""
    from dflash import model

    changed: dict[str, Any] = {"dense_mask": make_mask, "flex_mask": make_mask}
    if device == "cpu":
        changed["fused_flex"] = lambda: model.flex_attention
    with patch.multiple(model, **changed):
        yield


def attention(shapes: Shapes) -> Found:
    """Flex against dense attention: losses and gradients, of packed rows."""
    world, found = small_world(shapes)[1], {}
    for name, window, causal in (("full", 0, False), ("window", 16, True)):
        cfg = replace(shapes.small, sliding_window=window, is_causal=causal)
        drafter = attentive(cfg, shapes.device)
        for dtype in (torch.float32, torch.bfloat16):
            batch = world.batch(0, cfg.num_drafts, dtype, packed=True)
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            with attending(dense_mask, shapes.device):
                loss, wanted = gradient(drafter, world, batch, dtype)
            if shapes.device == "cuda":
                with attending(flex_mask, shapes.device):
                    other, gradients = gradient(drafter, world, batch, dtype)
                found[f"{key} gradients"] = distance(gradients, wanted)
            else:  # flex attention has no backward there
                with attending(flex_mask, shapes.device), torch.no_grad():
                    sums = loss_of(drafter, world, batch, dtype)
                    other = float(sums.loss / sums.weight)
            found[f"{key} loss"] = abs(other - loss) / loss
    return {"differences": found}


def packed(shapes: Shapes) -> Found:
    """Several samples in a row against one, with the attention of training on this device."""
    world, found = small_world(shapes)[1], {}
    drafter = attentive(shapes.small, shapes.device)
    for dtype in (torch.float32, torch.bfloat16):
        batches = [world.batch(0, shapes.small.num_drafts, dtype, packed=p) for p in (True, False)]
        (loss, grads), (other, wanted) = (gradient(drafter, world, b, dtype) for b in batches)
        key = str(dtype).removeprefix("torch.")
        found |= {
            f"{key} loss": abs(loss - other) / other,
            f"{key} gradients": distance(grads, wanted),
        }
        found[f"{key} rows"] = [len(batch.anchors_BN) for batch in batches]
    return {"differences": found}


def curves(shapes: Shapes) -> Found:
    """The same training in float32 and with products in bfloat16: first and last losses."""
    world, found = small_world(shapes)[1], {}
    for dtype in (torch.float32, torch.bfloat16):
        losses = train(new_drafter(shapes.small, seed=0).to(shapes.device), world, dtype)
        found[str(dtype).removeprefix("torch.")] = losses
    exact, rounded = found["float32"], found["bfloat16"]
    apart = [abs(a - b) / b for a, b in zip(rounded, exact, strict=True)]
    ends = {name: [losses[0], losses[-1]] for name, losses in found.items()}
    return {"steps": shapes.steps, "losses": ends, "largest_difference": max(apart)}


def rounds(shapes: Shapes) -> Found:
    """Replay against the reference decoder, with a drafter of a short training, in float32."""
    target, world = small_world(shapes)
    drafter = new_drafter(shapes.small, seed=0).to(shapes.device)
    train(drafter, world, torch.float32)
    k, decoded, requests = drafter.cfg.num_drafts, [], []
    for sample in world.samples[: shapes.requests]:
        prompt = sample.ids[~sample.loss_mask].tolist()
        answer = decode(target, prompt, 40, (), drafter, k)
        ids = [*prompt, *answer.output_ids]
        taps = target.features([ids], drafter.cfg.target_layer_ids)[0].taps
        requests.append(Request(torch.tensor(ids), len(prompt), taps))
        decoded.append(answer.accepted)
    walked = replay(drafter, world.embedding, world.head, requests, k)
    return {
        "rounds": sum(map(len, walked)),
        "accepted": sum(map(sum, walked)),
        "equal": walked == decoded,
    }


def memory(shapes: Shapes) -> Found:
    """Peak memory of a step of the large drafter against what `flywheel train --plan` predicts."""
    drafter, world = large_world(shapes)
    cfg, dtype = shapes.large, torch.bfloat16
    candidates = min(shapes.candidates + shapes.tokens, cfg.vocab_size)
    predicted = {
        "head": world.head.nbytes,
        **model_bytes(cfg, "muon", ranks=1),
        "activations": activation_bytes(cfg, 1, shapes.tokens, shapes.anchors, dtype),
        "softmax": head_bytes(cfg.hidden_size, candidates, dtype),
        "features": world.samples[0].features.nbytes,
    }
    found: Found = {"predicted": predicted, "predicted_total": sum(predicted.values())}
    if shapes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        train(drafter, replace(world, shapes=replace(shapes, steps=FEW_STEPS)), dtype)
        measured = torch.cuda.max_memory_allocated()
        found |= {"measured": measured, "measured_share": measured / found["predicted_total"]}
    return found


def step(shapes: Shapes) -> Found:
    """Forward and backward of the large drafter, without the optimizer: tokens, FLOP per second."""
    drafter, world = large_world(shapes)
    batch = world.batch(0, drafter.cfg.num_drafts, torch.bfloat16)
    params = list(drafter.parameters())

    def work() -> None:
        found = loss_of(drafter, world, batch, torch.bfloat16)
        torch.autograd.grad(found.loss, params)

    seconds = shapes.seconds(work)
    slots, supervised = shapes.anchors * shapes.large.block_size, float(batch.supervised_BNK.sum())
    flops = step_flops(shapes.large, world, batch)
    found = {
        "milliseconds": 1e3 * seconds,
        "parameters": sum(param.numel() for param in params),
        "slots_per_second": slots / seconds,
        "block_tokens_per_second": supervised / seconds,
        "flop_per_second": flops / seconds,
        "share_of_matmul": flops / seconds / matmul_flops(shapes),
    }
    name = torch.cuda.get_device_name() if shapes.device == "cuda" else ""
    stated = next((peak for word, peak in PEAK.items() if word in name), None)
    return found | ({"share_of_peak": flops / seconds / stated} if stated else {})


def step_flops(cfg: DrafterConfig, world: World, batch: Batch) -> float:
    """FLOP of `step`."""
    seen = (batch.anchors_BN - batch.starts_BN + cfg.block_size).sum() * cfg.block_size
    blocks, places = batch.anchors_BN.numel(), batch.features_BTF.shape[1]
    softmax = len(world.candidates.seen) + world.candidates.num_random
    logits = float(batch.supervised_BNK.sum()) * softmax
    return products(cfg, places, blocks, float(seen), logits)


def matmul_flops(shapes: Shapes) -> float:
    """FLOP per second of one large square bfloat16 product: what this device really reaches."""
    size = 8192 if shapes.device == "cuda" else 256
    matrix = torch.randn(size, size, device=shapes.device).bfloat16()
    return 2 * size**3 / shapes.seconds(lambda: matrix @ matrix)


def head(shapes: Shapes) -> Found:
    """The loss behind the head, by rows of a chunk: milliseconds, and MiB beside its inputs."""
    cfg, found = shapes.large, {}
    rows, device = shapes.anchors * cfg.num_drafts, shapes.device
    options = {"device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(rows, cfg.hidden_size, **options).requires_grad_()
    weight = torch.randn(shapes.candidates, cfg.hidden_size, **options) * 0.02
    labels = torch.randint(0, shapes.candidates, (rows, 1), device=device)
    ones, zeros = torch.ones(rows, 1, device=device), torch.zeros(len(weight), device=device)

    def work() -> None:
        FrozenHeadLoss.apply(hidden, weight, zeros, labels, ones, 0.0)[0].sum().backward()

    for chunk in shapes.chunks:
        with patch("dflash.frozen_head.ROWS_PER_CHUNK", chunk):
            found[chunk] = {"milliseconds": 1e3 * shapes.seconds(work)}
            if device == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                work()
                found[chunk]["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"rows": rows, "candidates": shapes.candidates, "chunks": found}


def muon(shapes: Shapes) -> Found:
    """One step of each optimizer over the matrices of the large drafter, in milliseconds."""
    with torch.device(shapes.device):
        drafter = Drafter(shapes.large)
    for param in drafter.parameters():
        param.grad = torch.randn_like(param)
    matrices = [param for param in drafter.parameters() if param.ndim == 2]
    sides: dict[str, Callable[[], object]] = {}
    for kind in ("muon", "adamw"):
        optimizers = build_optimizers(drafter, kind, 1e-4, torch.bfloat16)
        sides[kind] = lambda optimizers=optimizers: [one.step() for one in optimizers]
    sides["torch.optim.Muon"] = torch.optim.Muon(matrices, lr=1e-4).step
    return {"milliseconds": {name: 1e3 * shapes.seconds(work) for name, work in sides.items()}}


def replayed(shapes: Shapes) -> Found:
    """Replay of the large drafter: tokens/s of random answers (nothing is accepted), anchor by
    anchor and all at once; and what a forward costs, for the constants of dflash/replay.py.
    """
    cfg, device = shapes.large, shapes.device
    drafter, world = large_world(shapes)
    weights = {name: cast(t, torch.bfloat16) for name, t in drafter.state_dict().items()}
    drafter, sample = drafter_of(cfg, weights), world.samples[0]
    length = min(1024, shapes.tokens)
    request = Request(sample.ids[:length], length * 3 // 4, sample.features[:length])
    requests, found = [request] * shapes.requests, {}
    for name, overhead in (("by_anchor", 0), ("all_anchors", math.inf)):
        walked: list[list[int]] = []

        def work(walked: list = walked) -> None:
            walked[:] = replay(drafter, world.embedding, world.head, requests, cfg.num_drafts)

        constants = {"SLOTS_OF_A_FORWARD": overhead, "PLACES_OF_A_SLOT": math.inf}
        with patch.multiple("dflash.replay", **constants):
            seconds = replace(shapes, repeats=1).seconds(work)
        found[name] = {
            "tokens_per_second": len(requests) * request.num_output / seconds,
            "rounds": sum(map(len, walked)),
        }
    with torch.inference_mode():
        context = drafter.context(sample.features[None, :length].to(device))
        found["forward_milliseconds"] = {
            f"{rows} x {anchors}": 1e3
            * shapes.seconds(
                partial(forward, drafter, world.embedding, context, (rows, anchors), length)
            )
            for rows, anchors in ((1, 1), (1, 32), (shapes.requests, 1), (shapes.requests, 16))
        }
    return found


@torch.inference_mode()
def forward(
    drafter: Drafter, embedding: Tensor, context: list, size: tuple[int, int], length: int
) -> Tensor:
    """One forward of replay: blocks at the last anchors of `size[0]` requests of one context."""
    some = [(k.repeat(size[0], 1, 1, 1), v.repeat(size[0], 1, 1, 1)) for k, v in context]
    anchors = length - 1 - torch.arange(size[1], device=embedding.device).expand(size)
    tokens = torch.zeros_like(anchors)
    return draft_hidden(drafter, embedding, some, tokens, anchors, drafter.cfg.num_drafts)


def parallel(shapes: Shapes) -> Found:
    """Weights after training on one rank: replicated (DDP) and sharded (FSDP2) against plain."""
    world = replace(small_world(shapes)[1], shapes=replace(shapes, steps=FEW_STEPS))
    backend = "nccl" if shapes.device == "cuda" else "gloo"
    with TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        found: dict[str, Tensor] = {}
        for kind in ("plain", "ddp", "fsdp"):
            drafter = new_drafter(shapes.small, seed=0).to(shapes.device)
            if kind == "fsdp":
                shard(drafter)
            train(drafter, world, torch.float32, sum_gradients if kind == "ddp" else None)
            found[kind] = torch.cat([t.flatten() for t in whole_weights(drafter).values()])
        distributed.destroy_process_group()
    apart = {kind: distance(found[kind], found["plain"]) for kind in ("ddp", "fsdp")}
    return {"backend": backend, "steps": FEW_STEPS, "differences": apart}


@dataclass(frozen=True)
class Section:
    """What runs, and the most seconds it may take, with the start of its process."""

    run: Callable[[Shapes], Found]
    limit: float


SECTIONS = {
    "attention": Section(attention, 60),
    "packed": Section(packed, 45),
    "curves": Section(curves, 45),
    "rounds": Section(rounds, 45),
    "memory": Section(memory, 50),
    "step": Section(step, 60),
    "head": Section(head, 30),
    "muon": Section(muon, 40),
    "replay": Section(replayed, 50),
    "parallel": Section(parallel, 45),
}
