"""What is measured of a drafter, and what the gate asks of it."""

from dataclasses import dataclass
from ipaddress import ip_address
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Ui:
    """A page over the work folder, to look at."""

    host: str = setting("127.0.0.1", "address to listen on; another than the loopback needs names")
    port: int = setting(8900, "port to listen on; 0: a free one", minimum=0)
    names: list[str] = setting(
        [],
        "host names by which browsers may reach the page beside the loopback's; the page has no "
        "password",
    )

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ValueError(f"ui.port = {self.port}: ports end at 65535; 0 takes a free one")
        if wrong := [name for name in self.names if not name or set(name) & set("*/:@ ")]:
            raise ValueError(
                f"ui.names = {wrong[0]!r}: expected a host name as a browser shows it, without "
                "port, such as machine.example.com"
            )
        if not self.names and not is_loopback(self.host):
            raise ValueError(
                f"ui.host = {self.host!r}: the page has no password, and everyone who reaches "
                "this address could read it. Keep 127.0.0.1 and use `ssh -L`, or allow it with "
                "ui.names=[NAME], the name that browsers will use"
            )


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
