"""From traffic to features: the demo's clients, ingest, harvest."""

from dataclasses import dataclass
from typing import Literal

from jobs.base.settings import setting
from store.tables import KEPT_DAYS


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingest:
    """Request logs to traffic/."""

    logs: list[str] = setting(
        [],
        "log files, folders or globs, local or as URLs (s3://bucket/logs/); empty: capture/ in the "
        "scratch folder",
        path=True,
    )
    default_domain: str = setting("default", "domain of a request that names none")
    models: list[str] = setting(
        [], "model names the target answers under; empty: the one name that the logs hold"
    )
    min_output_tokens: int = setting(2, "shorter answers are not used", minimum=2)
    val_percent: int = setting(
        10, "share of conversations held out for checkpoint choice", minimum=0
    )
    test_percent: int = setting(10, "share of conversations held out for evaluation", minimum=0)
    text_logs: Literal["prompts", "answers"] = setting(
        "prompts",
        "what conversations without token ids are used as: prompts that `flywheel regenerate` asks "
        "the target, or answers to learn from as they are",
    )
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
class Regenerate:
    """Prompts of a former target, answered anew by the present one."""

    tokens: int = setting(
        1_000_000,
        "prompts are answered anew until their former answers have so many tokens; 0: none",
        minimum=0,
    )
    max_tokens: int = setting(2048, "longest answer", minimum=2)
    sampler: Literal["captured", "greedy"] = setting(
        "captured", "captured: with temperature, top_p, top_k and seed of the request"
    )
    former: str = setting(
        "",
        "folder of a former target, whose tokenizer is read if ingest has not kept it",
        local=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Select:
    """Traffic to selection/: which samples are learned from and judged on."""

    days: int = setting(
        0, "only traffic of this many days before the newest; 0: all of it", minimum=0
    )
    tokens: int = setting(20_000_000, "most tokens of all domains together", minimum=1)
    domain_tokens: int = setting(5_000_000, "most tokens of one domain", minimum=1)
    domains: list[str] = setting(
        [], "other budgets, as DOMAIN=TOKENS; 0 leaves a domain out, * stands for those not named"
    )
    tenant_share: float = setting(
        0.5, "most of a domain's budget that one of several tenants gets", minimum=0.0
    )
    per_prompt: int = setting(4, "most samples of one domain with the same prompt", minimum=1)
    garbled: float = setting(
        0.02,
        "training samples are left out whose served share of accepted drafts is at most this",
        minimum=-1.0,
    )
    looping: float = setting(
        0.98,
        "training samples are left out whose served share of accepted drafts is at least this",
        minimum=0.0,
    )
    version: int = setting(
        -1, "version of selection/ that later stages read; -1: the latest", minimum=-1
    )

    def __post_init__(self) -> None:
        for entry in self.domains:
            name, equals, tokens = entry.rpartition("=")
            if not (equals and name and tokens.isdecimal()):
                raise ValueError(
                    f"select.domains: {entry!r} is not DOMAIN=TOKENS, for instance tickets=2000000"
                )

    def budget(self, domain: str) -> int:
        """Most tokens of this domain."""
        parts = (entry.rpartition("=") for entry in self.domains)
        given = {name: int(tokens) for name, _, tokens in parts}
        return given.get(domain, given.get("*", self.domain_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class Harvest:
    """Traffic to features/: one teacher-forced pass of the target."""

    backend: Literal["transformers", "vllm"] = setting(
        "transformers", "engine that runs the target"
    )
    workers: int = setting(1, "Ray actors, each with its own target", minimum=1)
    cpus: int = setting(0, "CPUs of each; 0: as many as fit on the nodes", minimum=0)
    gpus: float = setting(1.0, "GPUs of each, where Ray has any; 0.5: two share one", minimum=0.01)
    samples_per_shard: int = setting(64, "samples in one feature file", minimum=1)
    batch_tokens: int = setting(4096, "tokens in one forward pass, padding included", minimum=1)
    top_k: int = setting(
        0,
        "tokens whose log-probability under the target is kept per answer position, for "
        "train.loss=argmax (1 is enough) and kl; 0: none",
        minimum=0,
    )
    features: Literal["bf16", "fp8"] = setting(
        "bf16", "how features are stored: bf16 is exact; fp8 takes about half of the disk"
    )
    max_reject_rate: float = setting(
        0.05, "stop when a larger share of samples is set aside, beyond chance", minimum=0
    )

    def __post_init__(self) -> None:
        if self.gpus > 1:
            raise ValueError(
                f"harvest.gpus = {self.gpus:g}: an engine computes on one GPU, set at most 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gc:
    """Compaction of tables, and removal of what no version needs."""

    days: int = setting(
        7, f"what no version needs is removed after this many days, at most {KEPT_DAYS}", minimum=0
    )

    def __post_init__(self) -> None:
        if self.days > KEPT_DAYS:
            raise ValueError(
                f"gc.days = {self.days}: tables know for {KEPT_DAYS} days when a file was removed "
                "from them, set fewer"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Size and age of the feature cache."""

    gib: float = setting(0.0, "most GiB of features that are kept; 0: no limit", minimum=0)
    days: float = setting(
        0.0, "features are removed this many days after they were harvested; 0: never", minimum=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """The simulated clients of the demo."""

    tickets: int = setting(120, "prompts of the narrow domain", minimum=1)
    general: int = setting(20, "prompts of the general domain", minimum=1)
    max_tokens: int = setting(64, "longest answer", minimum=8)
    concurrency: int = setting(32, "clients at the same time", minimum=1)
    seed: int = setting(0, "seed of the prompts", minimum=0)
    orders: int = setting(
        100, "prompts of the new domain that `flywheel demo-fleet` sends", minimum=8
    )
    more_steps: int = setting(80, "training steps of its second drafter", minimum=1)
