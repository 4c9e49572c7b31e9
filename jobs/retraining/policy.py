"""The policy as data: policy.yaml beside this file, or values of a user's own file.

policy.yaml has the meaning and the unit of each value, and its default, which stands nowhere else.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.base.settings import read_over, setting

DEFAULT = Path(__file__).with_name("policy.yaml")


def value(meaning: str, minimum: float | None = 0) -> Any:
    """A value that policy.yaml has."""
    return setting(None, meaning, minimum=minimum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Time that has passed."""

    hours: float = value("hours")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """New data of a domain."""

    min: int = value("answer tokens")
    domains: list[str] = value("DOMAIN=TOKENS", minimum=None)

    def __post_init__(self) -> None:
        for entry in self.domains:
            name, equals, tokens = entry.rpartition("=")
            if not (equals and name and tokens.isdecimal()):
                raise ValueError(
                    f"tokens.domains: {entry!r} is not DOMAIN=TOKENS, for instance tickets=200000"
                )

    def limit(self, domain: str) -> int:
        """New answer tokens from which on a domain fires; 0: never."""
        given = {name: int(n) for name, _, n in (e.rpartition("=") for e in self.domains)}
        return given.get(domain, self.min)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """A domain whose drafts are accepted less than before."""

    fall: float = value("share of the tokens per round")
    recovered: float = value("share of the tokens per round")
    short: int = value("requests", minimum=40)
    long: int = value("requests", minimum=40)
    error: float = value("chance", minimum=1e-9)

    def __post_init__(self) -> None:
        if self.fall and not self.recovered < self.fall < 1:
            raise ValueError(
                f"drift.recovered = {self.recovered} and drift.fall = {self.fall}: expected "
                "recovered < fall < 1, so that a domain at the limit does not flicker"
            )
        if self.long < self.short:
            raise ValueError(
                f"drift.long = {self.long} and drift.short = {self.short}: expected long >= short"
            )
        if self.error >= 0.5:
            raise ValueError(f"drift.error = {self.error}: expected a chance such as 0.001")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Another target, tokenizer or template."""

    changed: bool = value("true or false", minimum=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """All triggers."""

    OTHERS = "policy.yaml of this package lists them all"

    schedule: Schedule
    tokens: Tokens
    drift: Drift
    target: Target


def read_policy(file: str) -> Policy:
    """The values of policy.yaml, with the values of `file` in their place, as `read_over`."""
    return read_over(DEFAULT, Policy, file, "watch.policy")
