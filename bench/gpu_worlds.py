"""What the sections of bench/gpu.py compute with: shapes, random worlds, and steps of training."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dflash.batches import Batch, Sample, make_batch
from dflash.decode import decode
from dflash.drafter_config import DrafterConfig, default_taps
from dflash.frozen_head import Candidates
from dflash.losses import decay, default_gamma, recorded_token
from dflash.model import Drafter, new_drafter
from dflash.optim import build_optimizers
from dflash.parallel import clip_gradients
from dflash.target_model import Target
from dflash.training_step import draw_anchors, generator, step_loss, to_device

LR = 0.02


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What is computed where. `large` is timed, `small` is compared and trained."""

    device: str
    large: DrafterConfig
    small: DrafterConfig
    tokens: int  # of a large sample
    anchors: int  # of a large sample
    candidates: int  # random ones, beside the tokens of the data
    requests: int  # that are replayed
    samples: int  # small ones
    chunks: tuple[int, ...]
    steps: int
    repeats: int

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, after one that is not measured."""
        times = []
        for _ in range(self.repeats + 1):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])


def shape(hidden: int, layers: int, heads: int, kv_heads: int, **other: Any) -> DrafterConfig:
    """A drafter of 5 taps."""
    target_layers = other.pop("target_layers")
    return DrafterConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        num_target_layers=target_layers,
        target_layer_ids=default_taps(target_layers, 5),
        mask_token_id=other["vocab_size"] - 1,
        **other,
    )


def full() -> Shapes:
    """Drafters of an 8B target (Qwen3-8B: 36 layers, hidden size 4096), and a small one."""
    wide = {"intermediate_size": 12288, "head_dim": 128, "vocab_size": 151936, "block_size": 16}
    narrow = {"intermediate_size": 512, "head_dim": 64, "vocab_size": 512, "block_size": 8}
    return Shapes(
        device="cuda",
        large=shape(4096, 5, 32, 8, target_layers=36, **wide),
        small=shape(256, 2, 4, 2, target_layers=8, **narrow),
        tokens=3072,
        anchors=512,
        candidates=16384,
        requests=16,
        samples=16,
        chunks=(128, 256, 512, 1024, 2048, 4096),
        steps=60,
        repeats=5,
    )


_NARROW = {"intermediate_size": 64, "head_dim": 16, "vocab_size": 97, "block_size": 4}
_SMALL = shape(32, 2, 2, 1, target_layers=8, **_NARROW)
TINY = Shapes(
    device="cpu",
    large=_SMALL,
    small=_SMALL,
    tokens=48,
    anchors=8,
    candidates=20,
    requests=2,
    samples=5,
    chunks=(8, 16),
    steps=30,
    repeats=1,
)


# ---- worlds


@dataclass(frozen=True)
class World:
    """What a step needs beside the drafter."""

    shapes: Shapes
    samples: list[Sample]
    embedding: Tensor
    head: Tensor

    @cached_property
    def candidates(self) -> Candidates:
        """The tokens of the samples, and random ones."""
        seen = torch.cat([sample.ids for sample in self.samples]).unique()
        found = Candidates(seen, len(self.head), self.shapes.candidates)
        found.position = found.position.to(self.shapes.device)
        return found

    def batch(self, step: int, drafts: int, dtype: torch.dtype, packed: bool = False) -> Batch:
        """All samples, with fresh anchors."""
        picks = [(step, i) for i in range(len(self.samples))]
        anchors = draw_anchors(self.samples, picks, self.shapes.anchors, seed=0)
        batch = make_batch(self.samples, anchors, drafts, recorded_token, packed)
        return to_device(batch, torch.device(self.shapes.device), dtype)


@cache
def small_world(shapes: Shapes) -> tuple[Target, World]:
    """A random target of the small shape, in float32, and its own greedy answers with features."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = shapes.small
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_target_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        initializer_range=0.4,  # so that answers are not one token for ever
    )
    model: Any = LlamaForCausalLM(config)
    model.to(shapes.device).eval()
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    target = Target(model, torch.float32, embedding, head, cfg.num_target_layers)
    lengths = [8 + i % 5 for i in range(shapes.samples)]
    prompts = [torch.randint(0, cfg.vocab_size - 1, (n,)).tolist() for n in lengths]
    answers = [
        decode(target, prompt, 12 if i % 3 else 40).output_ids for i, prompt in enumerate(prompts)
    ]
    ids = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    samples = [
        Sample(
            str(i), "", torch.tensor(one), torch.arange(len(one)) >= len(prompt), made.taps.cpu()
        )
        for i, (one, prompt, made) in enumerate(
            zip(ids, prompts, target.features(ids, cfg.target_layer_ids), strict=True)
        )
    ]
    return target, World(shapes, samples, embedding, head)


def large_world(shapes: Shapes) -> tuple[Drafter, World]:
    """A new drafter of the large shape, and one random sample in bfloat16."""
    cfg, draw = shapes.large, torch.Generator().manual_seed(0)
    width = len(cfg.target_layer_ids) * cfg.hidden_size
    ids = torch.randint(0, cfg.vocab_size - 1, (shapes.tokens,), generator=draw)
    features = torch.randn(shapes.tokens, width, generator=draw, dtype=torch.bfloat16)
    answer = torch.arange(shapes.tokens) >= shapes.tokens // 4
    embedding = torch.randn(cfg.vocab_size, cfg.hidden_size, device=shapes.device) * 0.02
    embedding = embedding.bfloat16()
    with torch.device(shapes.device):  # `new_drafter` draws on the CPU: seconds for a billion
        drafter = Drafter(cfg)
    sample = Sample("0", "", ids, answer, features)
    return drafter, World(shapes, [sample], embedding, embedding)


def attentive(cfg: DrafterConfig, device: str) -> Drafter:
    """A new drafter in which attention counts: as it is drawn, it adds next to nothing."""
    drafter = new_drafter(cfg, seed=0)
    for layer in drafter.layers:
        layer.self_attn.o_proj.weight.data.mul_(20)
    return drafter.to(device)


# ---- steps


def loss_of(drafter: Drafter, world: World, batch: Batch, dtype: torch.dtype, step: int = 0) -> Any:
    """`step_loss` of a batch, with products in `dtype`."""
    weigh = partial(decay, gamma=default_gamma(drafter.cfg.block_size))
    borrowed = (world.embedding.to(dtype), world.head.to(dtype))
    draw = generator("candidates", step)
    return step_loss(drafter, batch, *borrowed, world.candidates, draw, weigh)


def gradient(
    drafter: Drafter, world: World, batch: Batch, dtype: torch.dtype
) -> tuple[float, Tensor]:
    """Loss per weight, and its gradient as one vector."""
    found = loss_of(drafter, world, batch, dtype)
    loss = found.loss / found.weight
    parts = torch.autograd.grad(loss, list(drafter.parameters()))
    return float(loss.detach()), torch.cat([part.flatten() for part in parts])


def train(
    drafter: Drafter, world: World, dtype: torch.dtype, exchange: Callable[..., None] | None = None
) -> list[float]:
    """Losses of some steps by Muon. exchange: what adds up the gradients of replicas."""
    optimizers = build_optimizers(drafter, "muon", LR, dtype)
    params, losses = list(drafter.parameters()), []
    for step in range(world.shapes.steps):
        batch = world.batch(step, drafter.cfg.num_drafts, dtype)
        found = loss_of(drafter, world, batch, dtype, step)
        (found.loss / found.weight).backward()
        if exchange is not None:
            exchange(params)
        clip_gradients(params, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float((found.loss / found.weight).detach()))
    return losses


def products(cfg: DrafterConfig, places: float, blocks: float, seen: float, logits: float) -> float:
    """FLOP of a forward and a backward, counted from the shapes. So what is computed twice, or
    masked, counts as loss of speed. The frozen head has no gradient of its own.

    places: positions of context; seen: keys summed over all slots of `blocks`; logits: supervised
    slots times tokens in the softmax.
    """
    kv = 2 * cfg.num_key_value_heads * cfg.head_dim
    heads = cfg.num_attention_heads * cfg.head_dim
    slot = cfg.hidden_size * (2 * heads + kv + 3 * cfg.intermediate_size)
    found = blocks * cfg.block_size * cfg.num_hidden_layers * slot
    found += places * cfg.num_hidden_layers * cfg.hidden_size * kv
    found += seen * 2 * heads * cfg.num_hidden_layers
    taps = places * len(cfg.target_layer_ids) * cfg.hidden_size**2  # features have no gradient
    return 6.0 * found + 4.0 * (taps + logits * cfg.hidden_size)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, relative to the norm of `wanted`."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
