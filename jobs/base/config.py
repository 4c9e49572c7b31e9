"""The whole configuration: one frozen section per stage, loaded from YAML and `section.key=value`.

    flywheel config                              # every key, its default and meaning, as YAML
    flywheel train --config my.yaml train.steps=200

A default lives here and nowhere else. Unknown keys and wrong types are refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from jobs.base.settings import build, parse_overrides, read_yaml, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The served model: a Hugging Face folder."""

    path: str = setting(
        "", "folder of the target; empty: <work>/target, made by `flywheel target`", path=True
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "compute dtype; auto: bfloat16 where the hardware multiplies it, else float32"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "where this process computes (replay, reference decoder, preflight); auto: a GPU if torch "
        "has one. Training has train.device, and vLLM its own build",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ray:
    """Where the jobs run."""

    address: str = setting("", "Ray cluster to join; empty: a local one that ends with the command")
    num_cpus: int = setting(0, "CPUs of the local cluster; 0: all", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlflow:
    """Experiment tracking and the model registry."""

    uri: str = setting("", "tracking and registry URI; empty: sqlite file <work>/mlflow.db")
    artifacts: str = setting(
        "", "artifact root; empty: <work>/mlartifacts, or the server's own if uri names one"
    )
    experiment: str = setting("flywheel", "experiment that collects the training runs")
    model: str = setting(
        "drafter", "registered model that carries champion, challenger, previous; no / or :"
    )

    def __post_init__(self) -> None:
        _check_name("mlflow.experiment", self.experiment)
        _check_name("mlflow.model", self.model, refused="/:")


def _check_name(setting_name: str, name: str, refused: str = "") -> None:
    """Raise ValueError for a name that MLflow or the database behind it would refuse later."""
    fault = ""
    if not name.strip() or name in (".", ".."):
        fault = "a name is needed"
    elif found := [c for c in name if c in refused]:
        fault = f"MLflow allows no {found[0]!r} in it, write - instead"
    elif len(name) > 256 or not name.isprintable() or name != name.strip():
        fault = "at most 256 printable characters, without space around them"
    if fault:
        raise ValueError(f"{setting_name} = {name!r}: {fault}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingest:
    """Request logs to traffic/."""

    logs: list[str] = setting([], "log files, folders or globs; empty: <work>/capture", path=True)
    default_domain: str = setting("default", "domain of a request that names none")
    models: list[str] = setting(
        [], "model names the target answers under; empty: the one name that the logs hold"
    )
    min_output_tokens: int = setting(2, "shorter answers are not used", minimum=2)
    val_percent: int = setting(
        10, "share of conversations held out for checkpoint choice", minimum=0
    )
    test_percent: int = setting(10, "share of conversations held out for evaluation", minimum=0)
    max_reject_rate: float = setting(
        0.05,
        "stop when a larger share of records, beyond chance, is damaged or cannot be trusted",
        minimum=0,
    )

    def __post_init__(self) -> None:
        held_out = self.val_percent + self.test_percent
        if held_out >= 100:
            raise ValueError(
                f"ingest.val_percent + ingest.test_percent = {held_out}: nothing is left "
                "to train on, lower one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Harvest:
    """Traffic to features/: one teacher-forced pass of the target."""

    backend: Literal["transformers", "vllm"] = setting(
        "transformers", "engine that runs the target"
    )
    workers: int = setting(1, "Ray actors, each with its own target", minimum=1)
    samples_per_shard: int = setting(64, "samples in one feature file", minimum=1)
    batch_tokens: int = setting(4096, "tokens in one forward pass, padding included", minimum=1)
    top_k: int = setting(
        0,
        "tokens whose log-probability under the target is kept per answer position, for "
        "train.loss=argmax (1 is enough) and kl; 0: none",
        minimum=0,
    )
    max_reject_rate: float = setting(
        0.05, "stop when a larger share of samples is set aside, beyond chance", minimum=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """Shape of a new drafter. A warm start (train.base) keeps the base's own shape."""

    layers: int = setting(2, "decoder layers", minimum=1)
    block_size: int = setting(8, "B: the anchor and B - 1 draft tokens", minimum=2)
    num_taps: int = setting(5, "target layers read, spread evenly", minimum=1)
    taps: list[int] = setting(
        [], "explicit target layers (id i = output of layer i); empty: num_taps decides"
    )
    mask_token_id: int = setting(
        -1, "token of the masked slots; -1: an unused special token", minimum=-1
    )
    draft_vocab: int = setting(
        8192,
        "tokens that can be drafted, the most frequent of the training answers; 0: the target's "
        "whole vocabulary, as where it is no larger",
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
    steps: int = setting(180, "optimizer steps; 0 exports the base as it is", minimum=0)
    batch_size: int = setting(4, "samples in a step, over all workers", minimum=1)
    anchors: int = setting(32, "random anchors per sample and step", minimum=1)
    max_length: int = setting(
        0, "train on the first so many tokens of a sample, prompt included; 0: all", minimum=0
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "what products run in; weights stay float32; auto: the target's dtype on a GPU or with "
        "AMX, float32 on other CPUs",
    )
    optimizer: Literal["muon", "adamw"] = setting(
        "muon", "muon: matrices by Muon, vectors by AdamW"
    )
    lr: float = setting(2e-2, "peak learning rate", minimum=0)
    warmup: float = setting(0.05, "share of the steps with rising learning rate", minimum=0)
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
    val_every: int = setting(90, "steps between replay evaluations on the val split", minimum=1)
    max_slice_loss: float = setting(
        0.05,
        "share of its tau that a domain may lose against train.base for weights to be kept; 1: all",
        minimum=0,
    )
    patience: int = setting(
        0, "stop after so many validations without better weights; 0: never", minimum=0
    )
    workers: int = setting(1, "Ray Train workers", minimum=1, execution=True)
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
    checkpoint_every: int = setting(
        100, "steps between resumable checkpoints", minimum=1, execution=True
    )
    fresh: bool = setting(
        False,
        "true: begin with today's traffic, instead of finishing a run that was interrupted",
        execution=True,
    )

    def __post_init__(self) -> None:
        if not (self.steps or self.base):
            raise ValueError("train.steps = 0 exports train.base as it is: set train.base")
        if abs(self.seed) >= 1 << 63:
            raise ValueError(f"train.seed = {self.seed}: it must fit in 64 bits")
        if self.mix >= 1:
            raise ValueError(f"train.mix = {self.mix}: below 1, or nothing is left of train.domain")
        if self.mix and not self.domain:
            raise ValueError(f"train.mix = {self.mix} needs train.domain: the domain adapted to")
        if self.gamma and self.weights != "decay":
            raise ValueError(
                f"train.gamma = {self.gamma} needs train.weights=decay; train.weights="
                f"{self.weights} has no gamma: set the one or drop the other"
            )
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

    source: str = setting("", "drafter folder in either format", path=True)
    dest: str = setting("", "new folder", path=True)
    format: Literal["zlab", "speculators"] = setting("zlab", "format that is written")
    verifier: str = setting(
        "", "name of the target in a speculators config; empty: the path of target.path"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Replay on held-out conversations."""

    drafter: str = setting("", "drafter folder; empty: the newest below <work>/drafters", path=True)
    baseline: str = setting(
        "", "drafter folder to compare with; empty: the champion, if any", path=True
    )
    split: Literal["val", "test"] = setting("test", "split that is replayed")
    bootstrap: int = setting(1000, "resamples (of conversations) behind the interval", minimum=100)
    regression: list[str] = setting(
        [], "further prompts to replay: JSONL or Parquet in the shapes of benchmarks, or humaneval"
    )
    regression_prompts: int = setting(
        64, "prompts taken from each regression set, evenly spaced; 0: all", minimum=0
    )
    regression_tokens: int = setting(256, "longest answer to a regression prompt", minimum=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """A drafter on the engine that will serve it, before promotion."""

    drafter: str = setting("", "drafter folder; empty: the newest below <work>/drafters", path=True)
    requests: int = setting(16, "held-out prompts that are served and compared", minimum=1)
    concurrency: int = setting(8, "of them in flight at the same time", minimum=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Promote:
    """The gate before a drafter becomes champion."""

    drafter: str = setting(
        "", "evaluated drafter folder; empty: the newest below <work>/drafters", path=True
    )
    min_gain: float = setting(
        0.0, "lower end of the paired tau gain over the champion must exceed this"
    )
    max_domain_loss: float = setting(0.05, "largest tau loss tolerated in one domain", minimum=0)
    min_tau: float = setting(1.1, "a drafter below this tau is not worth serving", minimum=1)
    new_shape: bool = setting(
        False, "accept another shape (taps, block, layers) than the champion's: replicas restart"
    )
    require_preflight: bool = setting(
        False, "refuse a drafter without a passed `flywheel preflight` under these settings"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """Back to the champion before."""

    reason: str = setting("no reason given", "why; recorded, and the gate shows it later")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve:
    """One vLLM server with the target and, if named, a drafter."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: a free one", minimum=0)
    drafter: str = setting("", 'drafter folder, or "champion"; empty: no speculation')
    k: list[int] = setting(
        [],
        "draft tokens per round at batch size 1, 2, ...; the last one for all larger batches; "
        "empty: what verify chose for this drafter, else block_size - 1",
    )
    max_model_len: int = setting(2048, "longest prompt + answer in tokens", minimum=1)
    max_num_seqs: int = setting(16, "requests in one batch", minimum=1)
    kv_cache_gib: int = setting(2, "KV cache on a CPU, GiB", minimum=1)
    eager: bool = setting(True, "skip torch.compile: starts minutes earlier on a CPU")
    capture: str = setting("", "folder for captured traffic; empty: off", path=True)
    args: list[str] = setting([], "further arguments for vLLM's server, as they are")

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ValueError(f"serve.port = {self.port}: ports end at 65535; 0 takes a free one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """The simulated clients of the demo."""

    tickets: int = setting(140, "prompts of the narrow domain", minimum=1)
    general: int = setting(20, "prompts of the general domain", minimum=1)
    max_tokens: int = setting(80, "longest answer", minimum=8)
    concurrency: int = setting(32, "clients at the same time", minimum=1)
    seed: int = setting(0, "seed of the prompts", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Served acceptance and speed beside the replayed ones."""

    domain: str = setting(
        "", "domain whose held-out prompts the speed is measured on; empty: the largest"
    )
    requests: int = setting(8, "prompts per speed pass at concurrency 8; a quarter at 1", minimum=2)
    repeats: int = setting(3, "interleaved passes per side and concurrency", minimum=1)
    concurrency: int = setting(16, "requests in flight while acceptance is counted", minimum=1)
    reference_requests: int = setting(
        2,
        "prompts for the reference decoder, which needs the target in float32; 0: none",
        minimum=0,
    )


METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp", "dflash")


@dataclass(frozen=True, kw_only=True, slots=True)
class Methods:
    """Other ways to draft beside DFlash. Prompts and passes are those of the verify section."""

    names: list[str] = setting(
        list(METHODS), "methods to compare with none, which is always measured"
    )
    k: list[int] = setting(
        [4],
        "draft tokens per round at batch size 1, 2, ..., the last one for all larger batches; "
        "dflash has its own, as it is served",
    )
    ngram_min: int = setting(2, "shortest n-gram looked up in prompt and answer", minimum=1)
    ngram_max: int = setting(4, "longest n-gram looked up", minimum=1)
    draft_model: str = setting(
        "", "folder of a smaller model with the target's vocabulary; empty: none", path=True
    )
    eagle3: str = setting("", "folder of an EAGLE-3 head for the target; empty: none", path=True)
    mtp: str = setting("", "folder of MTP heads; empty: the target's own, if any", path=True)
    dflash: str = setting(
        "", "drafter folder; empty: the champion, else the newest below <work>/drafters", path=True
    )

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in METHODS]
        if unknown or not self.names:
            raise ValueError(f"methods.names = {self.names}: expected some of {', '.join(METHODS)}")
        if not self.k or min(self.k) < 1:
            raise ValueError(f"methods.k = {self.k}: expected draft tokens per round, such as 4")
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"methods.ngram_min = {self.ngram_min} is above methods.ngram_max = "
                f"{self.ngram_max}: lower it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sql:
    """DuckDB over the acceptance rows."""

    question: str = setting("", "name of a file in sql/, or a path; empty: list them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run depends on. Stages read it, nothing writes to it."""

    work: str = setting("runs/demo", "folder that holds every product of a run", path=True)
    target: Target = field(default_factory=Target)
    ray: Ray = field(default_factory=Ray)
    mlflow: Mlflow = field(default_factory=Mlflow)
    ingest: Ingest = field(default_factory=Ingest)
    harvest: Harvest = field(default_factory=Harvest)
    drafter: Drafter = field(default_factory=Drafter)
    train: Train = field(default_factory=Train)
    convert: Convert = field(default_factory=Convert)
    evaluate: Evaluate = field(default_factory=Evaluate)
    preflight: Preflight = field(default_factory=Preflight)
    promote: Promote = field(default_factory=Promote)
    rollback: Rollback = field(default_factory=Rollback)
    serve: Serve = field(default_factory=Serve)
    demo: Demo = field(default_factory=Demo)
    verify: Verify = field(default_factory=Verify)
    methods: Methods = field(default_factory=Methods)
    sql: Sql = field(default_factory=Sql)

    def override(self, section: str, **values: Any) -> "Config":
        """A copy with some values of one section replaced."""
        return replace(self, **{section: replace(getattr(self, section), **values)})

    def path(self, *parts: str) -> Path:
        """The absolute path of something below the work folder."""
        return Path(self.work).expanduser().absolute().joinpath(*parts)

    @property
    def target_path(self) -> Path:
        """Folder of the target."""
        return Path(self.target.path) if self.target.path else self.path("target")

    @property
    def mlflow_uri(self) -> str:
        """MLflow tracking and registry URI."""
        return self.mlflow.uri or f"sqlite:///{self.path('mlflow.db')}"

    @property
    def mlflow_artifacts(self) -> str | None:
        """MLflow artifact root, a URI or an absolute path; None: where the MLflow server says."""
        if self.mlflow.artifacts or self.mlflow_uri.startswith(("http://", "https://")):
            return self.mlflow.artifacts or None
        return str(self.path("mlartifacts"))


def load(file: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then the YAML `file`, then `overrides` such as "train.steps=200"; the last wins.

    Raises:
        ValueError: an unknown key, a wrong type or an impossible value, named with what to write.
        OSError: `file` cannot be read.
    """
    values = read_yaml(Path(file)) if file else {}
    return build(Config, values, parse_overrides(Config, overrides))
