"""What a window trains with: where it starts, for how long, and what it must not forget."""

from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from dflash.checkpoint import read_config
from jobs.base.config import Config
from jobs.base.drafter_shape import misfits
from jobs.base.target_facts import target_config
from jobs.dataset.samples import selected
from jobs.registry.versions import CHAMPION, resolve
from store.windows import Window

NEW_SHARE, GROWN = 0.2, 2.0
"""A domain is adapted to if it has at least this share of a window's answer tokens, and this many
times its share of the earlier ones."""
LEAST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Recipe:
    """`base`: the version to start from, "" for a new drafter. `settings`: those of `train` that
    differ from the configuration. `notes`: why.
    """

    base: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """For the row of the step, so that an interrupted window goes on with the same."""
        return {"base": self.base, "settings": self.settings, "notes": self.notes}


def make_recipe(cfg: Config, window: Window, known: list[Window]) -> Recipe:
    """The recipe of a window whose samples are selected (cfg.select.version). What the user has
    set, train.base and train.domain, stays.
    """
    settings: dict[str, Any] = {}
    base, notes = start_of(cfg)
    if base:
        settings["lr"] = cfg.train.lr * cfg.retrain.warm_lr
        notes.append(f"train.lr {settings['lr']:g}, since it starts from the champion")
    numbers = window.whole["numbers"]
    domain = (
        ""
        if cfg.train.domain or not cfg.retrain.mix
        else adapted(numbers["tokens"], numbers["older"])
    )
    if domain and _can_adapt(cfg, domain):
        settings |= {"domain": domain, "mix": cfg.retrain.mix}
        notes.append(f"train.domain is new in this window; {cfg.retrain.mix:.0%} from the others")
    speed = seconds_per_step(known)
    if cfg.retrain.minutes and speed:
        steps = max(LEAST_STEPS, int(cfg.retrain.minutes * 60 / speed))
        if steps < cfg.train.steps:
            settings["steps"] = steps
            notes.append(f"{steps} steps in retrain.minutes, at {speed:.3g} s each")
    return Recipe(base, settings, notes)


def trained_with(cfg: Config, recipe: dict[str, Any]) -> Config:
    """The settings of a recipe (`Recipe.numbers`). Raises ValueError if its base is gone."""
    cfg = cfg.override("train", **recipe["settings"])
    if not recipe["base"]:
        return cfg
    found = resolve(cfg, recipe["base"])
    assert found is not None  # it has a number
    return cfg.override("train", base=str(found[1]))


def adapted(new: dict[str, int], older: dict[str, int]) -> str:
    """The domain whose share has grown most, by the constants above; "" for none, and in the first
    window. Tokens by domain, of the window and of all samples before.

    Example: {"a": 50, "b": 50} after {"a": 100} -> "b".
    """
    total, before = sum(new.values()), sum(older.values())
    if not total or not before:
        return ""
    shares = {name: (count / total, older.get(name, 0) / before) for name, count in new.items()}
    grown = {
        name: now - then
        for name, (now, then) in shares.items()
        if now >= NEW_SHARE and now >= GROWN * then
    }
    return max(sorted(grown), key=lambda name: grown[name], default="")


def seconds_per_step(known: list[Window]) -> float | None:
    """Seconds that a training step took in the latest window that trained; None if none has."""
    for window in reversed(known):
        trained = window.numbers("train")
        if trained.get("seconds") and trained.get("step"):
            return trained["seconds"] / trained["step"]
    return None


def start_of(cfg: Config) -> tuple[str, list[str]]:
    """(version that training starts from, why); "" for a new drafter, or the base of the user."""
    if cfg.train.base:
        return "", [f"train.base is set: {cfg.train.base}"]
    champion = resolve(cfg, CHAMPION)
    if champion is None:
        return "", ["a new drafter: there is no champion"]
    number, folder = champion
    wrong = misfits(cfg, read_config(folder, target_config(cfg)["num_hidden_layers"]))
    if wrong:
        name, (has, needed) = next(iter(wrong.items()))
        told = f"champion {number} has {name} {has}, and this target and drafter.taps give {needed}"
        return "", [f"a new drafter: {told}"]
    return number, [f"from champion {number}"]


def _can_adapt(cfg: Config, domain: str) -> bool:
    """Whether training can be adapted to a domain: it has samples to learn from and greedy ones to
    choose weights by, and others have something to replay.
    """
    rows = selected(cfg)
    mine, train = pc.field("domain") == domain, pc.field("split") == "train"
    greedy = (pc.field("split") == "val") & (pc.field("temperature") == 0.0)
    greedy &= pc.field("output_tokens") > 1
    wanted = (mine & train, ~mine & train, mine & greedy)
    return all(rows.filter(where).num_rows for where in wanted)
