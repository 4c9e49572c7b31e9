"""Drafters with evaluations as `flywheel evaluate` writes them, for tests of later stages."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash.checkpoint import compat_fields, compat_key, drafter_sha256, save_drafter
from dflash.drafter_config import DrafterConfig
from dflash.identity import target_id
from dflash.model import Drafter
from jobs import promote
from jobs.base.config import Config, load
from jobs.base.drafter_folders import MARK
from jobs.promotion.gate import judge
from jobs.promotion.gate_rules import read_rules
from jobs.proof.choose_k import Cost
from jobs.proof.kept_results import costs_key
from jobs.registry.versions import Registry, resolve
from store import promotions
from store.place import write_json

SHAPE = DrafterConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=50,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    block_size=4,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    mask_token_id=49,
)


def make_registry(folder: Path | str, database: Path, *settings: str) -> Config:
    """A work folder with a target and a registry without versions (`empty_database`)."""
    cfg = load(None, [f"work={folder}", *settings])
    make_target(cfg)
    shutil.copy(database, cfg.path("mlflow.db"))
    return cfg


def make_target(cfg: Config, **changes):
    folder = cfg.path("target")
    folder.mkdir(exist_ok=True, parents=True)
    shape = {"hidden_size": 16, "vocab_size": 50, "num_hidden_layers": 4}
    shape |= {"intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}
    shape |= {"rms_norm_eps": 1e-5} | changes
    (folder / "config.json").write_text(json.dumps(shape))
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")


def make_drafter(cfg: Config, name: str, seed: int, shape: DrafterConfig = SHAPE):
    """A random drafter in <work>/drafters; returns its folder on the local disk."""
    torch.manual_seed(seed)
    folder, place = cfg.path("drafters", name), cfg.place("drafters", name)
    save_drafter(Drafter(shape), folder, torch.float32)
    if not place.is_local:
        place.publish(folder, MARK)
    return folder


def evaluate(cfg: Config, folder, tau=2.0, against=None, gain=0.2, shape=SHAPE, **changes):
    """What `flywheel evaluate` writes; `against` is the folder of the baseline. The costs of a
    round with a drafter of this shape are known (`cost`).
    """
    identity = target_id(cfg.target_path)
    measured = {
        "pooled": tau,
        "weighted": tau,
        "macro": tau,
        "domains": {"a": tau, "b": tau},
        "positions": [0.5, 0.3, 0.2],
        "ci": [tau - 0.1, tau + 0.1],
    }
    baseline = None
    if against is not None:
        baseline = {
            "version": None,
            "drafter_sha256": drafter_sha256(against),
            "tau": measured | {"pooled": tau - gain, "domains": {"a": tau - gain, "b": tau - gain}},
            "delta": gain,
            "delta_ci": [gain - 0.1, gain + 0.1],
            "detectable": 0.14,
            "conversations": 40,
            "judged": [part("a", tau - gain, gain), part("b", tau - gain, gain)],
        }
    cost(cfg, shape)
    evaluation = {
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": identity,
        "compat_key": compat_key(shape, identity),
        "compat": compat_fields(shape, identity),
        "tau": measured,
        "baseline": baseline,
        "leaking": {"leaking": 0, "samples": 10},
        "samples": 10,
        "conversations": 40,
        "rounds": 100,
        "k": 3,
        "tau_by_k": {"1": 1 + (tau - 1) / 2, "2": 1 + (tau - 1) / 1.2, "3": tau},
    }
    place, name = cfg.place("evaluations"), f"{folder.name}.json"
    write_json(place, name, evaluation | changes)
    return Path(f"{place}/{name}")


def reasons(evaluation, champion=None):
    """What the gate has against an evaluation, by the rules of the package."""
    found = judge(read_rules(""), evaluation, champion)
    return [one.reason for one in found if one.verdict != "pass"]


def part(name: str, before: float, delta: float, half: float = 0.1, conversations: int = 20):
    """A domain or set as the gate judges it, with a 95 % interval of delta +- half."""
    return {
        "name": name,
        "share": 0.5,
        "members": [name],
        "before": before,
        "delta": delta,
        "ci": [delta - half, delta + half],
        "ci_corrected": [delta - 1.2 * half, delta + 1.2 * half],
        "tests": 2,
        "detectable": 1.5 * half,
        "conversations": conversations,
    }


def cost(cfg: Config, shape=SHAPE, step=0.010, rounds=0.012, each=0.0):
    """What `flywheel verify` keeps of costs: of a step, and of a round with one row or K + 1."""
    costs = [
        Cost(k=k, batch=batch, seconds=(rounds if k else step) + each * batch * (k + 1))
        for k in (0, 1, 3)
        for batch in (1, 8)
    ]
    identity = target_id(cfg.target_path)
    kept = {
        "ok": True,
        "drafter": "another",
        "drafter_sha256": "d" * 64,
        "target_id": identity,
        "compat": compat_fields(shape, identity),
        "costs": [asdict(one) for one in costs],
        "costs_key": costs_key(cfg),
    }
    write_json(cfg.place("verified"), f"costs-{compat_key(shape, identity)}.json", kept)


def promoted(cfg: Config, name: str, seed: int, against=None, **kwargs):
    folder = make_drafter(cfg, name, seed)
    evaluate(cfg, folder, against=against, **kwargs)
    return folder, promote.run(replace(cfg, promote=replace(cfg.promote, drafter=str(folder))))


def opened(cfg: Config, name: str) -> tuple[str, Path]:
    """Number and folder of an alias or version that must be there."""
    found = resolve(cfg, name)
    assert found is not None
    return found


def aliases(cfg: Config):
    found = {name: Registry(cfg).current(name) for name in ("champion", "previous", "challenger")}
    return {name: version.number for name, version in found.items() if version is not None}


def actions(cfg: Config):
    records = promotions.read(cfg.table("promotions"))
    return [(r["action"], r["from_version"], r["to_version"]) for r in records]
