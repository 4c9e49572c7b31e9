"""vLLM servers: the one that serves, and those that verify and compare."""

from dataclasses import dataclass
from typing import Literal

from jobs.base.settings import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve:
    """One vLLM server with the target and, if named, a drafter."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: a free one", minimum=0)
    drafter: str = setting(
        "", 'drafter folder, "champion", or the number of a version; empty: no speculation'
    )
    k: list[int] = setting(
        [],
        "draft tokens per round at batch size 1, 2, ...; the last one for all larger batches; "
        "0: no drafts; empty: what promote chose, else what verify chose for this drafter, else "
        "block_size - 1",
    )
    max_model_len: int = setting(2048, "longest prompt + answer in tokens", minimum=1)
    max_num_seqs: int = setting(16, "requests in one batch", minimum=1)
    kv_cache_gib: int = setting(2, "KV cache on a CPU, GiB", minimum=1)
    eager: bool = setting(True, "skip torch.compile: starts minutes earlier on a CPU")
    capture: str = setting("", "folder for captured traffic; empty: off", local=True)
    token_file: str = setting(
        "",
        "file with the secret that lets `flywheel rollout` change the drafter; empty: nobody can",
        local=True,
    )
    args: list[str] = setting([], "further arguments for vLLM's server, as they are")

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ValueError(f"serve.port = {self.port}: ports end at 65535; 0 takes a free one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Replicas of the server in section serve, behind one endpoint of Ray Serve."""

    action: Literal["up", "status"] = setting("up", "up: serve until Ctrl-C; status: what runs")
    replicas: int = setting(2, "vLLM servers", minimum=1)
    host: str = setting("127.0.0.1", "address that the endpoint listens on")
    port: int = setting(8000, "port that the endpoint listens on", minimum=1)
    cpus: float = setting(
        1.0, "CPUs that Ray reserves for each replica, and its threads on a CPU", minimum=0
    )
    gpus: float = setting(0.0, "GPUs that Ray reserves for each replica", minimum=0)
    sticky: bool = setting(
        False, "requests of one X-Flywheel-Conversation go to one replica, however busy it is"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Served acceptance and speed beside the replayed ones."""

    drafter: str = setting("", "evaluated drafter folder; empty: the champion", path=True)
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
        "", "folder of a smaller model with the target's vocabulary; empty: none", local=True
    )
    eagle3: str = setting("", "folder of an EAGLE-3 head for the target; empty: none", local=True)
    mtp: str = setting("", "folder of MTP heads; empty: the target's own, if any", local=True)
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
