"""When and how the loop turns again."""

from dataclasses import dataclass

from jobs.base.settings import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrain:
    """One window of new traffic to a new champion."""

    min_tokens: int = setting(
        10_000, "answer tokens of new samples below which a window is skipped", minimum=1
    )
    minutes: float = setting(
        0.0,
        "most minutes of training, at the speed of the last window: it lowers train.steps; 0: no "
        "limit",
        minimum=0,
    )
    mix: float = setting(
        0.5,
        "train.mix where a domain is new in a window; 0: samples are learned from as they come",
        minimum=0,
    )
    warm_lr: float = setting(
        0.5, "share of train.lr for a drafter that starts from the champion", minimum=0.001
    )
    fresh: bool = setting(
        False, "true: begin a new window, instead of finishing one that was interrupted"
    )

    def __post_init__(self) -> None:
        if self.mix >= 1:
            raise ValueError(f"retrain.mix = {self.mix}: a share below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Whether it is time for `flywheel retrain`."""

    policy: str = setting(
        "",
        "YAML file of the triggers, see docs/how-to/retrain.md; empty: those of this package",
        local=True,
    )
    run: bool = setting(False, "true: retrain where a trigger fires")
    stay: bool = setting(False, "true: go on watching, until Ctrl-C")
    poll: float = setting(300.0, "seconds between two looks, with watch.stay", minimum=0.05)
