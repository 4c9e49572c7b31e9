"""The rules of the gate as data: gate.yaml beside this file, or values of a user's own file.

gate.yaml has the meaning and the unit of each rule, and its default, which stands nowhere else.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.base.settings import read_over, setting

DEFAULT = Path(__file__).with_name("gate.yaml")


def rule(meaning: str, minimum: float | None = 0) -> Any:
    """A rule whose value gate.yaml has."""
    return setting(None, meaning, minimum=minimum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau:
    """How well it drafts at all."""

    min: float = rule("tokens per round", minimum=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What it gains over the champion."""

    min: float = rule("tokens per round", minimum=None)
    worth: float = rule("share of the champion's tau")

    def __post_init__(self) -> None:
        if self.worth == 0:
            raise ValueError("gain.worth = 0.0: no data shows such a gain: raise it, 0.02 say")


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """What it may lose in a part of the traffic."""

    max_loss: float = rule("share of the champion's tau there")
    visible: float = rule("share of the champion's tau there")

    def __post_init__(self) -> None:
        if not self.max_loss < self.visible <= 1:
            name = type(self).__name__.lower()
            raise ValueError(
                f"{name}.max_loss = {self.max_loss} and {name}.visible = {self.visible}: expected "
                "max_loss < visible <= 1, since data that shows a loss shows less than all of it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Domains(Losses):
    """What it may lose in one domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression(Losses):
    """What it may lose on one regression set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaking:
    """How much of the held-out text is training text."""

    max_share: float = rule("share of held-out samples")

    def __post_init__(self) -> None:
        if self.max_share > 1:
            raise ValueError(f"leaking.max_share = {self.max_share}: a share is at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Proof on the engine."""

    required: bool = rule("true or false", minimum=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Another shape than the champion's."""

    may_change: bool = rule("true or false", minimum=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What serving gains."""

    required: bool = rule("true or false", minimum=None)
    floor: list[float] = rule("times plain decoding, by batch size", minimum=None)

    def __post_init__(self) -> None:
        if not self.floor or min(self.floor) <= 0:
            raise ValueError(f"speed.floor = {self.floor}: expected numbers above 0, such as [1.0]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """All rules."""

    OTHERS = "gate.yaml of this package lists them all"

    tau: Tau
    gain: Gain
    domains: Domains
    regression: Regression
    leaking: Leaking
    preflight: Preflight
    shape: Shape
    speed: Speed


def read_rules(file: str) -> Rules:
    """The rules of gate.yaml, with the values of `file` in their place, as `read_over`."""
    return read_over(DEFAULT, Rules, file, "promote.gate")
