"""The page says what the rows say: checked against dflash.acceptance, not against SQL."""

import json
import random
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dflash.acceptance import num_rounds, positions, tau, tau_macro, tau_weighted
from jobs.base.config import load
from jobs.evaluation.intervals import Resamples
from jobs.evaluation.summaries import by_k, describe, gain
from jobs.report import run
from jobs.reporting.facts import Facts
from jobs.reporting.page import publish, render
from jobs.reporting.templates import interval
from jobs.tracking.mlflow_runs import experiment_id
from store import promotions
from store.schemas import SET_ASIDE
from store.set_aside import write_set_aside
from tests.helpers.tables import add_rows

OURS, THEIRS = "a" * 64, "b" * 64
REPEATS = [1 + 4 * (i % 3 == 0) for i in range(24)]
NOW = datetime(2026, 1, 2, tzinfo=UTC)
SERVED_K = 4


class Page(HTMLParser):
    """Cells of the tables by table id, figure ids, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.figures, self.text, self.tags = {}, [], "", []
        self._table = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags.append((tag, named))
        if tag == "table":
            self._table = self.tables.setdefault(named["id"], [])
        elif tag == "figure":
            self.figures.append(named["id"])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag == "td" and self._table is not None:
            self._table[-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self._table = None

    def handle_data(self, data):
        self.text += data
        if self._table and self._table[-1]:
            self._table[-1][-1] += data.strip()


def walks(seed, k, chance):
    """24 requests, each 12 rounds: every further draft is accepted with `chance`."""
    rng = random.Random(seed)

    def accept():
        count = 0
        while count < k and rng.random() < chance:
            count += 1
        return count

    return [[accept() for _ in range(12)] for _ in range(24)]


def publish_rows(cfg, accepted, version, k, origin="replay"):
    rows = [
        {
            "request_id": f"{origin}-{i}",
            "sample_id": f"s{i}",
            "conversation_id": f"c{i // 2}",
            "origin": origin,
            "drafter_version": version[:12],
            "target_id": "t1",
            "domain": ("tickets", "general <script>")[i % 4 == 0],
            "k": k,
            "block_size": 8,
            "temperature": 0.0,
            "accepted": request,
            "drafted": [k] * len(request),
            "prompt_tokens": 20,
            "output_tokens": sum(request) + len(request) + 1,
            "started_at": NOW,
            "finished_at": NOW,
            "replica": "",
            "repeat_count": REPEATS[i],
        }
        for i, request in enumerate(accepted)
    ]
    add_rows(cfg, "acceptance", rows)


@pytest.fixture
def cfg(tmp_path):
    return load(None, [f"work={tmp_path}"])


@pytest.fixture
def measured(cfg):
    """A drafter replayed at K 1 to 7 and served at 4, better than a baseline; returns its walks."""
    ours = {k: walks(1, k, 0.7) for k in range(1, 8)}
    theirs, served = walks(3, 7, 0.5), walks(2, SERVED_K, 0.7)
    for k, accepted in ours.items():
        publish_rows(cfg, accepted, OURS, k)
    publish_rows(cfg, theirs, THEIRS, 7)
    publish_rows(cfg, served, OURS, SERVED_K, "served")
    save(cfg, "evaluations", evaluation(ours, theirs))
    save(cfg, "verified", VERIFIED)
    return {"replay": ours, "served": served, "theirs": theirs}


def evaluation(ours, theirs):
    """What `flywheel evaluate` says about these walks."""
    rows = [
        {
            "domain": ("tickets", "general <script>")[i % 4 == 0],
            "language": None,
            "thinking": None,
            "shaped": "",
            "temperature": 0.0,
            "prompt_ids": [1] * (20 if i % 3 else 200),
            "repeat_count": REPEATS[i],
        }
        for i in range(24)
    ]
    draws = Resamples([f"c{i // 2}" for i in range(24)], 200)
    counted = {"samples": 24, "conversations": 12, "rounds": num_rounds(ours[7])}
    found = {"tau": describe(draws, rows, ours[7], 7), **by_k(ours)}
    baseline = {
        "drafter": "sql-run-0",
        "drafter_sha256": THEIRS,
        "tau": describe(draws, rows, theirs, 7),
        **gain(draws, rows, ours[7], theirs, (7, 7)),
    }
    return {
        "drafter": "sql-run-1",
        "drafter_sha256": OURS,
        "target_id": "t1",
        "split": "test",
        "k": 7,
        **counted,
        **found,
        "baseline": baseline,
        "regression": {"gsm8k": {**counted, **found, "baseline": baseline}},
    }


VERIFIED = {
    "drafter": "sql-run-1",
    "drafter_sha256": OURS,
    "k": SERVED_K,
    "k_by_batch_size": [SERVED_K, SERVED_K, 3],
    "k_by_slice": {"domain tickets": [5]},
    "predicted": {"1": {"3": 1.5, "4": 1.7}, "8": {"3": 1.2, "4": 1.1}},
    "costs": [{"k": 4, "batch": 1, "seconds": 0.06}],
    "speed_domain": "tickets",
    "speedup": {"1": 1.625, "8": 1.125},
    "speeds": [{"concurrency": 1, "ratio": 1.625, "ratios": [1.5, 1.75]}],
    "vllm_mean_acceptance_length": 3.125,
    "rounds": 288,
    "same_text": {"requests": 23, "identical_rounds": 22},
    "greedy": {"requests": 24, "identical": 23, "near_ties": 1, "different": 0},
    "reference": {
        "requests": 4,
        "identical": 3,
        "rounds": 40,
        "differing": [{"sample_id": "s1", "near_tie": True}],
    },
}


def save(cfg, folder, value):
    cfg.path(folder).mkdir(exist_ok=True)
    cfg.path(folder, "one.json").write_text(json.dumps(value))


def read(cfg):
    return Page(render(cfg, Facts(cfg, OURS)))


def cells(page, table):
    return [row for row in page.tables[table] if row]


def headline(accepted, k, origin, name="sql-run-1"):
    ci = Resamples([f"c{i // 2}" for i in range(24)], 1000).tau(accepted, k).interval
    return [name, origin, str(k), f"{tau(accepted):.3f}", interval(ci)] + [
        f"{tau_weighted(accepted, REPEATS):.3f}",
        f"{tau_macro(accepted):.3f}",
        str(num_rounds(accepted)),
        "24",
        "12",
    ]


def test_headline_is_the_definition_applied_to_the_rows(cfg, measured):
    page = read(cfg)
    assert cells(page, "headline") == [
        headline(measured["replay"][4], 4, "replay"),
        headline(measured["served"], 4, "served"),
        headline(measured["replay"][7], 7, "replay"),
        headline(measured["theirs"], 7, "replay", "sql-run-0"),
    ]
    assert f"gives {tau(measured['served']):.2f} tokens" in page.text


def test_pictures_show_replay_and_served_at_the_same_k(cfg, measured):
    page = read(cfg)
    assert page.figures == ["positions", "endings", "domains", "slices", "gains", "speed", "k"]
    labels = [attrs.get("aria-label", "") for tag, attrs in page.tags if tag == "figure"]
    shares = [f"{rate:.0%}" for rate in positions(measured["replay"][SERVED_K], SERVED_K)]
    assert f"replay {', '.join(shares)}; served " in labels[0]
    assert f"{tau(measured['served']):.2f}" in page.text  # a bar's label: SVG text stays text


def test_champion_and_challenger_are_compared_by_slice(cfg, measured):
    decision = {"action": "promote", "model": "drafter", "to_drafter": THEIRS[:12]}
    promotions.append(cfg.table("promotions"), decision)
    page = read(cfg)
    assert "sql-run-0 (champion)" in [row[0] for row in cells(page, "headline")]
    ours, theirs = measured["replay"][7], measured["theirs"]
    rows = {tuple(row[:2]): row for row in cells(page, "slices")}
    assert rows["all", "held-out requests"][6] == f"{tau(ours) - tau(theirs):+.3f}"
    tickets = [[w for i, w in enumerate(side) if i % 4] for side in (ours, theirs)]
    assert rows["domain", "tickets"][6] == f"{tau(tickets[0]) - tau(tickets[1]):+.3f}"
    assert rows["domain", "tickets"][2] == f"{tau(tickets[0]):.3f}"
    assert ("prompt tokens", "129..512") in rows
    assert ("regression set", "gsm8k") in rows
    assert "on the same samples" in page.text.lower()
    assert "better, difference +" in page.text
    assert "12 conversations find a true difference of" in page.text


def test_k_serving_and_gaps_are_told(cfg, measured):
    page = read(cfg)
    assert "Serve with K by batch size: 4 at 1 to 2, 3 from 3 on." in page.text
    assert "Traffic of domain tickets alone: K 5." in page.text
    by_k = {row[0]: row for row in cells(page, "by-k")}
    assert by_k["4"][1] == f"{tau(measured['replay'][4]):.3f}"
    assert by_k["4"][-2:] == ["1.70", "1.10"]
    assert by_k["7"][-2:] == ["-", "-"]
    assert "1.62 (1.50 to 1.75)" in page.text
    told = {text.partition(":")[0]: (done, text) for done, text in cells(page, "coverage")}
    assert told["replay against the reference decoder"][0] == "yes", "as verify judges it"
    assert "3 of 4" in told["replay against the reference decoder"][1]
    assert "1 at near ties" in told["replay against the reference decoder"][1]
    assert told["preflight on the serving engine"][0] == "no"
    assert told["sampled requests"][0] == "no"
    assert "24 requests of 12 conversations" in told["acceptance counted by vLLM"][1]
    assert "not by language, thinking, temperature, shaped" in told["slices"][1]


def test_a_drafter_that_failed_verify_is_not_recommended(cfg, measured):
    """The page once said `yes` and `Serve with K` even after a failed verify."""
    faults = ["served tau 2.000 is -10.0% off the replayed 2.222 (limit 1.0%)", "texts <differ>"]
    wrong = [{"sample_id": "s1", "near_tie": False}]
    failed = {"ok": False, "faults": faults, "comparison": {"faults": faults[:1]}}
    failed["reference"] = VERIFIED["reference"] | {"differing": wrong}
    save(cfg, "verified", VERIFIED | failed)
    page = read(cfg)
    assert "Serve with" not in page.text
    assert "No K is recommended: the drafter failed flywheel verify" in page.text
    for fault in faults:
        assert f"flywheel verify failed: {fault}" in page.text
    assert ["result", "failed"] in cells(page, "served")
    told = {text.partition(":")[0]: done for done, text in cells(page, "coverage")}
    assert told["acceptance counted by vLLM"] == "failed"
    assert told["replay against the reference decoder"] == "failed"
    save(cfg, "verified", VERIFIED | {"comparison": {"faults": [], "unchecked": "too short"}})
    told = {text.partition(":")[0]: done for done, text in cells(read(cfg), "coverage")}
    assert told["acceptance counted by vLLM"] == "no"


def test_replay_of_the_served_texts_is_told_apart_from_that_of_the_recorded_ones(cfg, measured):
    compared = {"tau_replay": 2.222, "tau_served": 2.2, "faults": [], "unchecked": ""}
    save(cfg, "verified", VERIFIED | {"comparison": compared})
    assert "), replay of the served ones 2.22 (+1.0%)." in read(cfg).text


@pytest.mark.parametrize("change", ["k", "greedy", "reference", "predicted", "comparison"])
def test_a_result_of_another_version_is_one_message(cfg, measured, change):
    save(cfg, "verified", {k: v for k, v in VERIFIED.items() if k != change} | {"comparison": None})
    with pytest.raises(ValueError, match=r"is not as this version writes it .* measure again"):
        publish(cfg, OURS)


def test_without_verification_no_k_is_recommended(cfg, measured):
    cfg.path("verified", "one.json").unlink()
    page = read(cfg)
    assert "No K is recommended" in page.text
    assert page.figures == ["positions", "endings", "slices", "gains", "k"]
    assert "served" not in page.tables
    told = {text.partition(":")[0]: done for done, text in cells(page, "coverage")}
    assert told["acceptance counted by vLLM"] == told["speed"] == "no"


def test_preflight_is_shown(cfg, measured):
    checks = [
        {"name": "drafts", "found": "7 differ", "status": "fail", "fix": "mind the <rope>"},
        {"name": "tau", "found": "fine", "status": "ok", "fix": ""},
    ]
    result = {"drafter_sha256": OURS, "ok": False, "vllm": "vllm 0", "checks": checks}
    save(cfg, "preflight", result)
    page = read(cfg)
    assert [row[0] for row in cells(page, "preflight")] == ["fail", "ok"]
    assert "mind the <rope>" in page.text
    told = {text.partition(":")[0]: done for done, text in cells(page, "coverage")}
    assert told["preflight on the serving engine"] == "failed"


def test_page_is_self_contained_and_escapes_names_from_logs(cfg, measured):
    page = read(cfg)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]
    outside = [v for _, attrs in page.tags for name, v in attrs.items() if name in ("src", "href")]
    assert outside == []


def test_text_known_from_training_is_a_warning_on_the_page(cfg, measured):
    assert "share their text" not in read(cfg).text
    told = {text.partition(":")[0]: done for done, text in cells(read(cfg), "coverage")}
    assert told["held-out text apart from training text"] == "no", "an older evaluation: unknown"
    evaluated = json.loads(cfg.path("evaluations", "one.json").read_text())
    for leaking, done in ((0, "yes"), (26, "failed")):
        save(cfg, "evaluations", evaluated | {"leaking": {"samples": 26, "leaking": leaking}})
        page = read(cfg)
        assert ("26 of 26 held-out samples share their text" in page.text) is bool(leaking)
        assert "never trained on" not in page.text
        told = {text.partition(":")[0]: done for done, text in cells(page, "coverage")}
        assert told["held-out text apart from training text"] == done


def test_samples_set_aside_are_counted_once_and_by_reason(cfg, measured):
    told = dict(cells(read(cfg), "coverage")[i][::-1] for i in (2,))
    assert list(told) == ["samples set aside:\nnone"]
    row = dict.fromkeys(SET_ASIDE.names) | {"target_id": "t1", "reason": "other_text"}
    for key in ("taps-a", "taps-b"):  # the same sample, under two choices of layers
        rows = [row | {"sample_id": name, "features_key": key} for name in ("s1", "s2")]
        write_set_aside(cfg.table("set_aside"), key, rows)
    other = row | {"sample_id": "s3", "target_id": "t2", "features_key": "taps-a"}
    write_set_aside(cfg.table("set_aside"), "taps-a", [other])
    text = cells(read(cfg), "coverage")[2][1]
    assert "2 samples were set aside by harvest, mostly other_text: 2" in text


def test_same_rows_give_the_same_pictures(cfg, measured):
    pages = [render(cfg, Facts(cfg, OURS)) for _ in range(2)]
    assert pages[0].startswith("<!doctype html>"), "anything before it turns quirks mode on"
    first, second = (page[page.index("<figure") : page.rindex("</figure>")] for page in pages)
    assert first == second


def test_without_an_evaluation_there_is_no_page(cfg):
    assert publish(cfg, OURS) is None
    with pytest.raises(ValueError, match="run `flywheel evaluate` first"):
        run(cfg)


def test_damaged_and_older_evaluations_are_named(cfg, measured):
    older = json.loads(cfg.path("evaluations", "one.json").read_text())
    del older["conversations"]
    save(cfg, "evaluations", older)
    with pytest.raises(ValueError, match="older version: run `flywheel evaluate` again"):
        Facts(cfg, OURS)
    cfg.path("evaluations", "one.json").write_text('{"drafter": ')
    with pytest.raises(ValueError, match=r"evaluations/one.json is damaged"):
        publish(cfg, OURS)


def test_the_page_goes_to_the_run_of_the_drafter(cfg, measured):
    page = run(cfg)["report"]
    run(cfg)  # a second time: the same run, the same artifact
    client = MlflowClient(cfg.mlflow_uri)
    [found] = client.search_runs([experiment_id(client, cfg)])
    assert found.data.tags["flywheel.run"] == "sql-run-1"
    [artifact] = client.list_artifacts(found.info.run_id, "reports")
    assert artifact.path == "reports/sql-run-1.html"
    assert cfg.path("reports", "sql-run-1.html") == Path(page)
