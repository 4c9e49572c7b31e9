"""From features to a drafter: its shape, its training, its formats."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jobs.base.settings import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """Shape of a new drafter. A warm start (train.base) keeps the base's own shape."""

    head: Literal["dflash", "dflash2"] = setting(
        "dflash",
        "dflash2: with convolutions and a selector of paths, also on a plain train.base "
        "(docs/how-to/choose-a-head.md)",
    )
    layers: int = setting(5, "decoder layers", minimum=1)
    block_size: int = setting(16, "B: the anchor and B - 1 draft tokens", minimum=2)
    num_taps: int = setting(5, "target layers read, spread evenly", minimum=1)
    taps: list[int] = setting(
        [], "explicit target layers (id i = output of layer i); empty: num_taps decides"
    )
    mask_token_id: int = setting(
        -1, "token of the masked slots; -1: an unused special token", minimum=-1
    )
    draft_vocab: int = setting(
        0,
        "tokens that can be drafted, the most frequent of the training answers; 0: the target's "
        "whole vocabulary, as where it is no larger, and always with drafter.head=dflash2",
        minimum=0,
    )
    sliding_window: int = setting(
        0,
        "positions that a slot sees back, itself included, in every layer; at least block_size; "
        "0: all",
        minimum=0,
    )

    def __post_init__(self) -> None:
        if any(low >= high for low, high in pairwise(self.taps)):
            raise ValueError(f"drafter.taps = {self.taps}: layer ids must be strictly increasing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Features to a drafter."""

    base: str = setting(
        "",
        "drafter folder to start from, z-lab's or speculators' format; empty: a new one",
        path=True,
    )
    part: Literal["all", "head"] = setting(
        "all", "head: train only what drafter.head=dflash2 adds, and leave the body as it is"
    )
    block_size: int = setting(
        0, "another block size for train.base than its own, at least 2; 0: its own", minimum=0
    )
    steps: int = setting(10_000, "optimizer steps; 0 exports the base as it is", minimum=0)
    batch_size: int = setting(64, "samples in a step, over all workers", minimum=1)
    anchors: int = setting(512, "random anchors per sample and step", minimum=1)
    max_length: int = setting(
        3072, "train on the first so many tokens of a sample, prompt included; 0: all", minimum=0
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "what products run in; weights stay float32; auto: the target's dtype on a GPU or with "
        "AMX, float32 on other CPUs",
    )
    optimizer: Literal["muon", "adamw"] = setting(
        "adamw", "muon: matrices by Muon, vectors by AdamW"
    )
    lr: float = setting(6e-4, "peak learning rate", minimum=0)
    warmup: float = setting(0.04, "share of the steps with rising learning rate", minimum=0)
    loss: Literal["ce", "argmax", "kl"] = setting(
        "ce",
        "ce: cross-entropy against the recorded token; argmax: against the target's likeliest; "
        "kl: divergence from the target's harvest.top_k likeliest and one bucket for the rest",
    )
    tv: float = setting(
        0.0, "factor of a total-variation term (chance of rejection) in the loss", minimum=0
    )
    weights: Literal["decay", "dpace"] = setting(
        "dpace", "weight of the slots of a block: fixed decay, or D-PACE (by expected acceptance)"
    )
    selector_weights: Literal["decay", "dpace"] = setting(
        "dpace", "the same for the second loss of drafter.head=dflash2, by its own chances"
    )
    gamma: float = setting(
        0.0,
        "train.weights=decay: slot k weighs exp(-(k - 1) / gamma); 0: by block size, 4 for 8",
        minimum=0,
    )
    clip: float = setting(1.0, "largest gradient norm; 0: any", minimum=0)
    ema: float = setting(
        0.0,
        "decay of a moving average of the weights, such as 0.99; it is what is validated and "
        "exported; 0: off",
        minimum=0,
    )
    lora_rank: int = setting(
        0, "train low-rank additions of this rank to a frozen train.base; 0: all weights", minimum=0
    )
    lora_targets: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "matrices that get low-rank additions; fc is possible too",
    )
    random_block: bool = setting(
        False, "train each step on blocks of a random size 2..B, for serving with fewer drafts"
    )
    random_candidates: int = setting(
        4096,
        "tokens drawn per step to stand for all that the training answers never contain; "
        "the vocabulary size or more: the exact softmax",
        minimum=0,
    )
    seed: int = setting(0, "seed of anchors, order and new weights", minimum=0)
    domain: str = setting("", "domain that is adapted to; empty: all samples as they come")
    mix: float = setting(
        0.0,
        "share of the supervised block tokens that comes from other domains than train.domain",
        minimum=0,
    )
    val_samples: int = setting(24, "val requests replayed, at most, of each domain", minimum=1)
    val_every: int = setting(500, "steps between replay evaluations on the val split", minimum=1)
    max_slice_loss: float = setting(
        0.05,
        "share of its tau that a domain may lose against train.base for weights to be kept; 1: all",
        minimum=0,
    )
    patience: int = setting(
        0, "stop after so many validations without better weights; 0: never", minimum=0
    )
    workers: int = setting(1, "Ray Train workers", minimum=1, execution=True)
    cpus: int = setting(
        0, "CPUs of each; 0: as many as fit on the nodes", minimum=0, execution=True
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: a GPU for each worker if the Ray cluster has them", execution=True
    )
    shard: Literal["ddp", "fsdp"] = setting(
        "ddp", "fsdp: weights, gradients and optimizer state cut over the workers", execution=True
    )
    micro_batch: int = setting(
        0, "samples in one forward of a worker; 0: its whole share", minimum=0, execution=True
    )
    cache_gib: float = setting(
        4.0, "features a worker keeps in memory; more are read again", minimum=0, execution=True
    )
    readers: int = setting(
        2,
        "threads of a worker that read the features of the next step",
        minimum=1,
        execution=True,
    )
    checkpoint_every: int = setting(
        500, "steps between resumable checkpoints", minimum=1, execution=True
    )
    fresh: bool = setting(
        False,
        "true: begin with today's traffic, instead of finishing a run that was interrupted",
        execution=True,
    )

    def __post_init__(self) -> None:
        if not (self.steps or self.base):
            raise ValueError("train.steps = 0 exports train.base as it is: set train.base")
        if self.warmup > 1:
            raise ValueError(f"train.warmup = {self.warmup}: a share of the steps, at most 1")
        if abs(self.seed) >= 1 << 63:
            raise ValueError(f"train.seed = {self.seed}: it must fit in 64 bits")
        if self.mix >= 1:
            raise ValueError(f"train.mix = {self.mix}: below 1, or nothing is left of train.domain")
        if self.mix and not self.domain:
            raise ValueError(f"train.mix = {self.mix} needs train.domain: the domain adapted to")
        if self.gamma and "decay" not in (self.weights, self.selector_weights):
            raise ValueError(
                f"train.gamma = {self.gamma} needs train.weights=decay; train.weights="
                f"{self.weights} has no gamma: set the one or drop the other"
            )
        if self.block_size and not self.base:
            raise ValueError("train.block_size is for a train.base; a new one: drafter.block_size")
        if self.part == "head" and self.lora_rank:
            raise ValueError("train.part=head trains no matrix of the body: drop train.lora_rank")
        if self.ema >= 1:
            raise ValueError(f"train.ema = {self.ema}: a decay is below 1, such as 0.99")
        if self.lora_rank and not self.base:
            raise ValueError("train.lora_rank needs a drafter to adapt: set train.base")
        if self.lora_rank and self.optimizer != "adamw":
            raise ValueError(
                "train.lora_rank: low-rank factors are trained by AdamW; set train.optimizer=adamw "
                "and a train.lr such as 1e-3"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Convert:
    """A drafter folder in another format: z-lab's, which everything here reads, or speculators'."""

    source: str = setting("", "drafter folder in either format", local=True)
    dest: str = setting("", "new folder", local=True)
    format: Literal["zlab", "speculators"] = setting("zlab", "format that is written")
    verifier: str = setting(
        "", "name of the target in a speculators config; empty: the path of target.path"
    )
