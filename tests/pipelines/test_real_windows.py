"""Two windows with the real stages on a tiny target; only vLLM is replaced."""

import json
import shutil

import pytest
import torch

from dflash.checkpoint import drafter_sha256
from dflash.decode import decode
from dflash.target_model import load_target
from dflash.training_step import generator
from jobs.base import cli
from jobs.dataset.queries import ask, find_question
from jobs.training.validation import Choice
from pipelines import retrain
from store import windows
from store.ids import drafter_version
from tests.helpers.retraining import GATE, NOON
from tests.helpers.tables import add_rows
from tests.helpers.work import configure, record


@pytest.fixture
def cfg(work, tmp_path, empty_database, monkeypatch):
    (tmp_path / "gate.yaml").write_text(GATE)
    shutil.copy(empty_database, work / "mlflow.db")
    # A server of vLLM would take a minute: tests/jobs/test_preflight.py has it.
    passed = ("preflight", lambda cfg: {"ok": True, "checks": []})
    real = [one if one[0] != "preflight" else passed for one in retrain.DELIVER]
    monkeypatch.setattr(retrain, "DELIVER", real)
    gate = f"promote.gate={tmp_path / 'gate.yaml'}"
    # A random target has little to learn: without this, the second window ends as `unchanged`.
    offer = Choice.offer
    monkeypatch.setattr(Choice, "offer", lambda self, step, *rest: offer(self, step, *rest) or step)
    return configure(work, gate, "retrain.min_tokens=100", "evaluate.bootstrap=200")


def add_log(work, count):
    """Greedy answers to new prompts, in a domain of their own."""
    target = load_target(work / "target", torch.float32)
    with open(work / "capture" / "more.jsonl", "w") as log:
        for i in range(count):
            prompt = torch.randint(1, 90, (5 + i % 4,), generator=generator("more", i)).tolist()
            line = record(1000 + i, prompt, decode(target, prompt, 20, [0]).output_ids)
            log.write(json.dumps(line | {"domain": "c"}) + "\n")


@pytest.mark.slow
@pytest.mark.usefixtures("one_process", "ray_cluster")
def test_the_second_window_starts_from_the_champion_of_the_first(cfg, work, capsys):
    first = retrain.run(cfg)
    assert (first["window"], first["state"], first["promoted"]) == (1, "promoted", "1")
    add_log(work, 30)
    second = retrain.run(cfg)
    assert (second["window"], second["state"], second["promoted"]) == (2, "promoted", "2")
    assert [*second["tokens"]] == ["c"]
    one, two = windows.read(cfg.table("windows"))
    recipe, before = two.numbers("train"), one.numbers("train")
    assert (before["base"], recipe["base"]) == ("", "1")
    assert recipe["settings"] == {"lr": cfg.train.lr / 2, "domain": "c", "mix": 0.5}
    assert recipe["name"] != before["name"]
    version = cfg.table("windows").version()
    assert retrain.run(cfg)["state"] == "nothing new"
    assert cfg.table("windows").version() == version
    mine = drafter_version(drafter_sha256(cfg.path("drafters", before["name"])))
    evaluated = two.numbers("evaluate")
    assert evaluated["baseline"] == mine == one.numbers("evaluate")["drafter"]
    assert evaluated["gain_low"] <= evaluated["gain"] <= evaluated["gain_high"]
    assert {"folder", "step", "seconds"} <= recipe.keys()  # what later windows need of it
    assert two.numbers("promote")["previous"] == "1"
    gain = ask(cfg, find_question("gain_of_windows").read_text()).to_pylist()
    assert [row["window"] for row in gain] == [1, 2]
    assert gain[1]["predicted_low"] <= gain[1]["predicted_gain"] <= gain[1]["predicted_high"]
    assert gain[1]["why"].startswith("not known yet")
    served(cfg, mine, [1, 0, 2], 40)
    served(cfg, evaluated["drafter"], [3, 1, 2], 40)
    gain = ask(cfg, find_question("gain_of_windows").read_text()).to_pylist()
    assert gain[1]["served_gain"] == pytest.approx(9 / 6 - 1)
    assert (gain[1]["requests_before"], gain[1]["requests_after"]) == (40, 40)
    assert cli.main(["sql", "gain_of_windows", f"work={work}"]) == 0
    assert "it paid" in capsys.readouterr().out


def served(cfg, drafter, accepted, count):
    shared = {"origin": "served", "log": "x", "domain": "c", "accepted": accepted}
    shared |= {"drafter_version": drafter, "drafted": [4] * len(accepted), "finished_at": NOON}
    add_rows(cfg, "acceptance", [shared | {"request_id": f"{drafter}{i}"} for i in range(count)])
