"""Ways to draft: what each one needs, and what it lacks here."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.checkpoint import read_config
from jobs.base.config import Config
from jobs.base.drafter_folders import local_folder, newest_drafter
from jobs.base.target_facts import target_config
from jobs.dataset.slices import Row
from jobs.registry.versions import resolve
from jobs.servers.configured import verified_k

MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of a target's config for its number of layers for multi-token prediction (MTP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to draft. `k`: drafts per round, by batch size as in `serve.k`.

    Without a `model`, mtp uses heads of the target; ngram and suffix look up earlier text.
    """

    name: str
    k: list[int] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict)  # of vLLM's speculative config
    model: Path | None = None
    missing: str = ""  # why it cannot be tried

    @property
    def settings(self) -> Row:
        """The settings that are shown beside its results; {} if it has no K."""
        model = {"model": self.model.name} if self.model else {}
        return {"k": self.k, **self.options, **model} if self.k else {}

    @property
    def files(self) -> list[list[Any]]:
        """[path, bytes, time of change] of each file of its model; part of the key of a result."""
        found = sorted(self.model.iterdir()) if self.model else []
        return [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in found]


def describe(cfg: Config, name: str) -> Method:
    """The method `name` of the `methods` section; `missing` says why it cannot be tried here."""
    if name == "dflash":
        return dflash(cfg)
    ours = cfg.methods
    options, model, missing = {}, model_folder(cfg, name), ""
    if name == "ngram":
        options = {"prompt_lookup_min": ours.ngram_min, "prompt_lookup_max": ours.ngram_max}
    elif name == "suffix":
        # Speed passes repeat their prompts: with a cache they would find their own answers.
        options = {"suffix_decoding_max_cached_requests": 0}
        if importlib.util.find_spec("arctic_inference") is None:
            missing = "the package arctic-inference is not installed"
    elif model is None and name != "mtp":
        missing = f"no model: methods.{name} names no folder"
    elif model is None and not has_mtp_heads(target_config(cfg)):
        missing = "the target has no MTP heads, and methods.mtp names no folder"
    return Method(name=name, k=ours.k, options=options, model=model, missing=missing)


def dflash(cfg: Config) -> Method:
    """methods.dflash, else the champion, else the newest drafter, with the K it is served with."""
    folder = model_folder(cfg, "dflash")
    if folder is None:
        champion = resolve(cfg, "champion")
        folder = champion[1] if champion else None
    if folder is None:
        folder = newest_drafter(cfg)
    if folder is None:
        return Method(name="dflash", missing=f"no drafter in {cfg.place('drafters')}")
    k = cfg.serve.k or verified_k(cfg, folder)
    if not any(k):  # it pays nowhere, but is to be compared
        k = [read_config(folder).num_drafts]
    return Method(name="dflash", k=k, model=folder)


def model_folder(cfg: Config, name: str) -> Path | None:
    """The folder that methods.NAME names, if any. Raises ValueError if it holds no model."""
    named = getattr(cfg.methods, name, "")
    if not named:
        return None
    folder = local_folder(cfg, named)
    if not (folder / "config.json").is_file():
        raise ValueError(f"methods.{name} = {named}: not a model folder, it has no config.json")
    return folder


def has_mtp_heads(config: dict[str, Any]) -> bool:
    """Whether a target's config names layers for multi-token prediction."""
    parts = [config, config.get("text_config") or {}]
    return any(part.get(name) for part in parts for name in MTP_LAYERS)
