"""Evaluation on a tiny target: sampled traffic, slices, two drafters, regression sets."""

import json
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dflash.acceptance import tau
from dflash.checkpoint import load_drafter, save_drafter
from dflash.decode import decode
from dflash.model import new_drafter
from dflash.replay import Request, replay
from dflash.target_model import load_target
from jobs import evaluate, harvest
from jobs.base import devices
from jobs.base.config import Config, load
from jobs.base.drafter_shape import drafter_config
from jobs.dataset import queries
from jobs.dataset.samples import load_requests
from jobs.evaluation import drafters, regression_sets
from jobs.evaluation.prompt_files import read_prompts
from jobs.evaluation.replay_walks import untrained_walks
from jobs.reporting.facts import pick
from tests.helpers.promotion import reasons
from tests.helpers.tables import put_rows
from tests.helpers.work import RIVAL_SETTINGS

BY_DOMAIN = queries.find_question("tau_by_domain_and_version").read_text()


@pytest.fixture(scope="module")
def work(tmp_path_factory, rivals):
    """A copy of `rivals` for this module."""
    return shutil.copytree(rivals, tmp_path_factory.mktemp("evaluate") / "work")


def configure(folder, *more) -> Config:
    return load(None, [f"work={folder}", *RIVAL_SETTINGS, *more])


def test_champion_and_challenger_on_greedy_and_sampled_traffic(work):
    found = evaluate.run(configure(work, f"evaluate.baseline={work / 'blank'}"))
    measured, baseline = found["tau"], found["baseline"]
    assert (found["samples"], found["drafter"], baseline["drafter"]) == (16, "known", "blank")
    assert measured["pooled"] > 1.3 > baseline["tau"]["pooled"]
    low, high = baseline["delta_ci"]
    assert 0 < low < baseline["delta"] < high
    assert baseline["delta"] == pytest.approx(measured["pooled"] - baseline["tau"]["pooled"])
    assert baseline["conversations"] == 16
    assert 0 < baseline["detectable"] < baseline["delta"]
    assert len(baseline["delta_positions"]) == len(measured["positions_ci"]) == found["k"] == 4
    parts = measured["slices"]
    assert list(parts["temperature"]) == ["0", "0.5..1"]
    assert parts["temperature"]["0"]["tau"] > parts["temperature"]["0.5..1"]["tau"]
    assert parts["temperature"]["0.5..1"]["ci"] is None, "four conversations"
    assert list(parts["language"]) == ["de", "unknown"]
    assert "prompt tokens" not in parts, "all prompts are short"
    assert set(baseline["delta_slices"]["domain"]) == {"a", "b"}
    rows = configure(work).table("acceptance").read().to_pylist()
    mine = [r for r in rows if r["k"] == 4 and r["drafter_version"] == found["drafter_sha256"][:12]]
    assert {round(r["temperature"], 2) for r in mine} == {0.0, 0.7}
    walks = [r["accepted"] for r in mine]
    assert tau(walks) == pytest.approx(measured["pooled"]) == pytest.approx(measured["weighted"])


def test_samples_that_traffic_has_often_count_as_often(work, tmp_path):
    """tau.weighted is what the fleet serves: over every request, not over every sample."""
    work = shutil.copytree(work, tmp_path / "work")
    cfg = configure(work)
    rows = cfg.table("selection").read().to_pylist()
    for i, row in enumerate(rows):
        row["repeat_count"] = 1 + 10 * (i % 2)
    put_rows(cfg, "selection", rows)
    result = evaluate.run(cfg)
    found, mine = result["tau"], {"k": 4, "drafter_version": result["drafter_sha256"][:12]}
    walked = pick(cfg.table("acceptance").read().to_pylist(), **mine)
    repeated = [r["accepted"] for r in walked for _ in range(r["repeat_count"])]
    assert len(repeated) == 8 + 8 * 11
    assert found["weighted"] == pytest.approx(tau(repeated)) != found["pooled"]
    for name, weighted in found["weighted_domains"].items():
        part = pick(walked, domain=name)
        assert weighted == pytest.approx(
            tau([r["accepted"] for r in part for _ in range(r["repeat_count"])])
        )
    mine |= {"domain": "(all)", "temperature": 0.0}
    [total] = pick(queries.ask(cfg, BY_DOMAIN).to_pylist(), **mine)
    greedy = pick(walked, temperature=0.0)
    repeated = [row["accepted"] for row in greedy for _ in range(row["repeat_count"])]
    assert total["tau_weighted"] == pytest.approx(tau(repeated))


def test_what_a_pinned_run_learned_before_it_moved_to_test_is_a_leak(work, monkeypatch):
    """A later log can move samples to another split: then the train split does not have them."""
    cfg = configure(work, f"evaluate.baseline={work / 'blank'}")
    rows = drafters.load_rows(cfg, "test", sampled=True)
    name, other = rows[0]["sample_id"], rows[1]["sample_id"]
    for run, learned, val in (("known", name, other), ("elsewhere", other, name)):
        (work / "runs" / run).mkdir(parents=True)
        pin = pa.table({"sample_id": [learned, val], "split": ["train", "val"]})
        pq.write_table(pin, work / "runs" / run / "pin-abc.parquet")
    monkeypatch.setattr(evaluate, "publish", lambda *args: work / "page")
    found = evaluate.run(cfg)
    assert found["leaking"] == {"leaking": 1, "samples": 16}
    (work / "runs" / "elsewhere").rename(work / "runs" / "blank")
    found = evaluate.run(cfg)
    assert found["leaking"]["leaking"] == 2, "the baseline knows another"
    [reason] = [r for r in reasons(found) if "share their text" in r]
    assert "2 of 16 held-out samples" in reason
    shutil.rmtree(work / "runs")


def test_a_selection_that_is_made_meanwhile_changes_nothing(work, monkeypatch):
    """Else its train split may have the held-out samples, and all of them would be leaks."""
    cfg = configure(work)
    chosen, real = cfg.table("selection").read().to_pylist(), evaluate.held_out

    def late(cfg, sides):
        rows = real(cfg, sides)
        put_rows(cfg, "selection", [row | {"split": "train"} for row in chosen])
        return rows

    monkeypatch.setattr(evaluate, "held_out", late)
    monkeypatch.setattr(evaluate, "publish", lambda *args: work / "page")
    assert evaluate.run(cfg)["leaking"]["leaking"] == 0
    put_rows(cfg, "selection", chosen)


def test_every_k_and_the_alpha_model(work):
    found = evaluate.run(configure(work))
    assert found["baseline"] is None
    assert list(found["tau_by_k"]) == list(found["alpha"]["misfit"]) == ["1", "2", "3", "4"]
    for k, measured in found["tau_by_k"].items():
        assert measured == pytest.approx(found["alpha"]["tau"][k] + found["alpha"]["misfit"][k])


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_regression_set_is_answered_once_and_walked(work, tmp_path, monkeypatch):
    gsm = write(
        tmp_path / "gsm.jsonl", *[{"question": f"w{5 + i} w9", "answer": "1"} for i in range(6)]
    )
    chats = write(tmp_path / "chats.jsonl", {"turns": ["w5 w6", "w7"], "category": "c"})
    settings = [
        f"evaluate.regression=[{gsm},{chats}]",
        "evaluate.regression_tokens=12",
        f"evaluate.baseline={work / 'blank'}",
    ]
    cfg = configure(work, *settings)
    found = evaluate.run(cfg)["regression"]
    assert {name: one["samples"] for name, one in found.items()} == {"gsm": 6, "chats": 2}
    assert found["chats"]["baseline"]["delta_ci"] is None, "two turns are one conversation"
    target = load_target(work / "target", torch.float32)
    drafter = load_drafter(work / "drafters" / "known")
    walks = []
    for i in range(6):
        prompt = [5 + i, 9, 9]
        ids = [*prompt, *decode(target, prompt, 12, [0, 1]).output_ids]
        features = target.features([ids], drafter.cfg.target_layer_ids)[0].taps
        request = Request(torch.tensor(ids), len(prompt), features)
        walks += replay(drafter, target.embedding, target.head, [request], 4)
    assert found["gsm"]["tau"]["pooled"] == pytest.approx(tau(walks), abs=0.05)
    sets = regression_sets.load_sets(cfg)
    first, second = sets.answered["chats"][0]
    assert second["prompt_ids"][:3] == first["prompt_ids"] == [5, 6, 9]
    assert second["prompt_ids"][-2:] == [7, 9], "the second question follows the first answer"
    monkeypatch.setattr(regression_sets, "load_target", None)  # answers come from the cache
    monkeypatch.setattr(devices, "free_bytes", lambda: 1000)
    assert regression_sets.load_sets(cfg).answered.keys() == {"gsm", "chats"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_regression_answers_end_where_the_engine_ends_them(work, tmp_path, dtype):
    """They end at an id that only generation_config.json names, as in vLLM. They are computed in
    the configured dtype, and the kept file names it.
    """
    target = shutil.copytree(work / "target", tmp_path / "target")
    asked = [{"question": f"w{5 + i} w9", "answer": ""} for i in range(6)]
    prompts = read_prompts(str(write(tmp_path / "g.jsonl", *asked)), 0)
    words = [f"work={tmp_path}", f"target.dtype={dtype}", "evaluate.regression_tokens=24"]
    cfg = load(None, words)
    before = [row["output_ids"] for row in regression_sets.answered(cfg, prompts)]
    end = before[0][3]
    path = target / "generation_config.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"eos_token_id": [0, end]}))
    rows = regression_sets.answered(cfg, prompts)
    for row, whole in zip(rows, before, strict=True):
        until = whole.index(end) + 1 if end in whole else len(whole)
        assert row["output_ids"] == whole[:until]
    kept = [json.loads(path.read_text()) for path in cfg.path("answers").iterdir()]
    assert {one["dtype"] for one in kept} == {dtype}
    assert len({one["target_id"] for one in kept}) == 2, "the file is part of the target"


def test_a_set_that_a_target_too_large_would_have_to_answer_is_skipped_by_name(
    work, tmp_path, monkeypatch
):
    """Nothing is loaded, the evaluation says why, and the gate refuses the drafter."""
    gsm = write(tmp_path / "large.jsonl", {"question": "w31 w9", "answer": ""})
    monkeypatch.setattr(devices, "free_bytes", lambda: 1000)
    monkeypatch.setattr(regression_sets, "load_target", None)
    cfg = configure(work, f"evaluate.regression=[{gsm}]")
    found = evaluate.run(cfg)
    assert found["regression"] == {}
    why = found["regression_skipped"]["large"]
    assert "GiB in float32, 0.0 GiB are free on the CPU" in why
    assert f"regression: set large was not measured: {why}" in reasons(found)


@pytest.mark.parametrize("aside", [False, True])
def test_a_regression_set_without_a_round_is_skipped_by_name(work, tmp_path, monkeypatch, aside):
    """It once ended evaluate after all replays, with a message that did not name the set."""
    one = write(
        tmp_path / "one.jsonl", *[{"question": f"w{5 + i}", "answer": "1"} for i in range(2)]
    )
    two = write(tmp_path / "two.jsonl", {"question": "w7 w8", "answer": "1"})
    cfg = configure(work, f"evaluate.regression=[{one},{two}]", "evaluate.regression_tokens=12")
    load_sets = regression_sets.load_sets

    def without_rounds(cfg):
        found = load_sets(cfg)
        rows, requests = found.answered["one"]
        short: Any = [
            Request(r.ids[: r.num_prompt + 1], r.num_prompt, r.features) for r in requests
        ]
        found.answered["one"] = ([], []) if aside else (rows, short)
        return found

    monkeypatch.setattr(regression_sets, "load_sets", without_rounds)
    found = evaluate.run(cfg)
    assert list(found["regression"]) == ["two"]
    why = "set all of its answers aside" if aside else "every answer is a single token"
    assert why in found["regression_skipped"]["one"]
    assert any("set one was not measured" in reason for reason in reasons(found))


def test_a_loss_on_a_regression_set_is_refused(work, tmp_path):
    gsm = write(tmp_path / "g.jsonl", {"question": "w5 w9", "answer": "1"})
    cfg = configure(
        work,
        f"evaluate.regression=[{gsm}]",
        f"evaluate.drafter={work / 'blank'}",
        f"evaluate.baseline={work / 'drafters' / 'known'}",
        "evaluate.regression_tokens=12",
    )
    found = evaluate.run(cfg)
    (judged,) = found["regression"]["g"]["baseline"]["judged"]
    assert (judged["conversations"], judged["ci"]) == (1, None)
    assert any("regression g: 1 conversations, fewer than 5" in reason for reason in reasons(found))
    judged |= {"ci": [-0.6, -0.4], "ci_corrected": [-0.7, -0.3], "before": 2.0}
    told = "regression g: a loss of more than 2.0% of tau 2.000 is established"
    assert told in reasons(found)
    found["tau"]["ci"] = None
    assert any("have a round" in reason for reason in reasons(found))


def test_two_sets_of_one_name_are_refused(work, tmp_path):
    (tmp_path / "x").mkdir()
    first = write(tmp_path / "g.jsonl", {"question": "w5", "answer": "1"})
    second = write(tmp_path / "x" / "g.jsonl", {"question": "w6", "answer": "1"})
    with pytest.raises(ValueError, match="different names, got g, g"):
        regression_sets.load_sets(configure(work, f"evaluate.regression=[{first},{second}]"))


def test_a_drafter_with_other_taps_is_compared_on_the_same_samples(work, tmp_path):
    """It could once never replace a champion: evaluate refused the comparison the gate needs."""
    work = shutil.copytree(work, tmp_path / "work")
    cfg = configure(work, f"evaluate.baseline={work / 'blank'}")
    other = cfg.override("drafter", taps=[1, 4], block_size=4)
    save_drafter(new_drafter(drafter_config(other), 5), work / "drafters" / "taps", torch.float32)
    cfg = cfg.override("evaluate", drafter=str(work / "drafters" / "taps"))
    with pytest.raises(ValueError, match=r"16 of 16 .*`flywheel harvest drafter\.taps=1,4`"):
        evaluate.run(cfg)
    harvest.run(configure(work, "drafter.taps=1,4"))
    found = evaluate.run(cfg)
    alone = evaluate.run(configure(work, f"evaluate.drafter={work / 'blank'}"))
    assert found["samples"] == found["baseline"]["conversations"] == 16
    assert found["compat"]["target_layer_ids"] == [1, 4]
    assert len(found["baseline"]["delta_positions"]) == found["k"] == 3
    assert found["baseline"]["tau"]["pooled"] == alone["tau"]["pooled"], "its own features"
    backwards = cfg.override(
        "evaluate", drafter=str(work / "blank"), baseline=str(work / "drafters" / "taps")
    )
    assert evaluate.run(backwards)["baseline"]["delta"] == pytest.approx(
        -found["baseline"]["delta"]
    )


def test_samples_that_either_side_set_aside_are_left_out_of_both(work, monkeypatch):
    cfg = configure(work, f"evaluate.baseline={work / 'blank'}")
    everything = {row["sample_id"] for row in drafters.load_rows(cfg, "test", sampled=True)}
    gone = set(sorted(everything)[:3])
    monkeypatch.setattr(drafters, "set_aside", lambda *_: gone)
    found = evaluate.run(cfg)
    assert (found["samples"], found["baseline"]["conversations"]) == (13, 13)
    monkeypatch.setattr(drafters, "set_aside", lambda *_: everything)
    with pytest.raises(ValueError, match="no test sample of target"):
        evaluate.run(cfg)


def test_a_leaking_set_is_counted_and_said(work, monkeypatch, capsys):
    cfg = configure(work)
    assert evaluate.run(cfg)["leaking"] == {"leaking": 0, "samples": 16}
    monkeypatch.setattr(
        "jobs.evaluation.replay_walks.leaking",
        lambda train, asked: set(asked["sample_id"].to_pylist()[:2]),
    )
    assert evaluate.run(cfg)["leaking"] == {"leaking": 2, "samples": 16}
    assert "2 of 16 samples share their text with training" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_side_is_replayed_in_the_dtype_of_the_config(work, dtype):
    """In bfloat16 an untrained drafter once got features of another dtype: a traceback, in the demo
    after verify.
    """
    name = str(dtype).removeprefix("torch.")
    cfg = configure(work, f"evaluate.baseline={work / 'blank'}", f"target.dtype={name}")
    borrowed = drafters.load_on(cfg)
    assert borrowed[0].dtype == dtype
    assert drafters.drafter_on(work / "blank", borrowed).fc.weight.dtype == dtype
    found = evaluate.run(cfg)
    # The drafter has memorised the answers well enough: 0.1 tau is five rounds in 200.
    assert found["tau"]["pooled"] == pytest.approx(known_tau(work), abs=0.1)
    rows, requests = load_requests(cfg, "test")
    walks = untrained_walks(cfg, requests, 4)
    assert tau(walks) < 1.3
    assert len(walks) == len(rows)


def known_tau(work):
    return evaluate.run(configure(work))["tau"]["pooled"]
