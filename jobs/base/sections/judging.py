"""What is measured of a drafter, and what the gate asks of it."""

from dataclasses import dataclass
from typing import Literal

from jobs.base.settings import setting


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
    gate: str = setting(
        "",
        "YAML file of the gate's rules, see docs/explanation/gate.md; empty: those of this package",
        local=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """Back to the champion before."""

    reason: str = setting("no reason given", "why; recorded, and the gate shows it later")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sql:
    """DuckDB over the tables of the work folder."""

    question: str = setting(
        "", "name of a file in sql/, or a path; shell: a prompt for your own; empty: list them"
    )
    parameters: list[str] = setting([], "of the question, as NAME=VALUE")
    format: Literal["table", "csv", "json", "parquet"] = setting(
        "table", "of the answer; all but table go to stdout, without a summary"
    )

    def __post_init__(self) -> None:
        if wrong := [word for word in self.parameters if "=" not in word]:
            raise ValueError(f"sql.parameters = {wrong[0]!r}: write NAME=VALUE")
