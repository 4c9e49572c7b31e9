"""What a server gets from the configuration, without starting one."""

import json
import os

import pytest
import torch

from dflash.checkpoint import drafter_sha256, save_drafter
from dflash.identity import target_id
from dflash.model import Drafter
from jobs.base import devices
from jobs.base.config import load
from jobs.servers import configured
from tests.helpers.promotion import SHAPE
from tests.helpers.tiny import make_target


@pytest.fixture
def cfg(tmp_path):
    make_target(tmp_path / "target")
    return load(None, [f"work={tmp_path}"])


def test_auto_is_resolved_for_the_device_that_serves(cfg, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("dflash.target_model._amx", lambda: False)
    for on_cpu, expected in ((True, torch.float32), (False, torch.bfloat16)):
        monkeypatch.setattr(devices, "vllm_runs_on_cpu", lambda on_cpu=on_cpu: on_cpu)
        assert devices.served_dtype(cfg) == expected
        named = cfg.override("target", dtype="float16")
        assert devices.served_dtype(named) == torch.float16


def verified(cfg, folder, name, age, **changes):
    found = {"drafter_sha256": drafter_sha256(folder), "k_by_batch_size": [7, 3]}
    path = cfg.path("verified", f"{name}.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found | {"target_id": target_id(cfg.target_path)} | changes))
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_k_is_what_the_latest_verify_of_this_drafter_chose(cfg):
    folder = save_drafter(Drafter(SHAPE), cfg.path("drafters", "one"), torch.float32)
    assert configured.verified_k(cfg, folder) == []
    verified(cfg, folder, "a", 30)
    verified(cfg, folder, "b", 20, k_by_batch_size=[5])
    verified(cfg, folder, "c", 10, drafter_sha256="other", k_by_batch_size=[1])
    assert configured.verified_k(cfg, folder) == [5]
    path = verified(cfg, folder, "d", 0)
    path.write_text("{}")
    with pytest.raises(
        ValueError, match=r"d\.json is damaged \(it lacks drafter_sha256, target_id"
    ):
        configured.verified_k(cfg, folder)
    path.unlink()
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-05", "0.1"))
    assert configured.verified_k(cfg, folder) == [], "another rms_norm_eps is another drafter"


def test_a_drafter_that_pays_nowhere_is_not_served(cfg):
    folder = save_drafter(Drafter(SHAPE), cfg.path("drafters", "one"), torch.float32)
    serving = cfg.override("serve", drafter=str(folder))
    verified(cfg, folder, "a", 30, k_by_batch_size=[3, 0])
    assert configured.server(serving).k == (3, 0)
    verified(cfg, folder, "b", 20, k_by_batch_size=[0])
    none = configured.server(serving)
    assert (none.drafter, none.k, none.drafter_version) == (None, (), None)
    assert configured.server(serving.override("serve", k=[2])).k == (2,)


def test_a_champion_is_served_with_the_k_that_its_promotion_chose(cfg, monkeypatch):
    folder = save_drafter(Drafter(SHAPE), cfg.path("drafters", "one"), torch.float32)
    monkeypatch.setattr(configured, "resolve", lambda *args: ("4", folder))
    monkeypatch.setattr(configured, "served_k", lambda cfg, number: {"4": [2, 0]}[number])
    verified(cfg, folder, "a", 30, k_by_batch_size=[3])
    serving = cfg.override("serve", drafter="champion")
    assert configured.server(serving).k == (2, 0)
    monkeypatch.setattr(configured, "served_k", lambda *args: [])
    assert configured.server(serving).k == (3,)
