"""The page says what the rows say: checked against dflash.acceptance, not against SQL."""

import json
import random
from datetime import UTC, datetime
from html.parser import HTMLParser

import pyarrow as pa
import pytest

from dflash.acceptance import num_rounds, positions, tau, tau_macro
from jobs.config import load
from jobs.report import run, write_report
from store import promotions
from store.schemas import ACCEPTANCE
from store.shards import write_manifest, write_shard

OURS, THEIRS = "a" * 64, "b" * 64
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


def publish(cfg, key, accepted, version, k, origin="replay"):
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
        }
        for i, request in enumerate(accepted)
    ]
    folder = cfg.path("acceptance")
    table = pa.Table.from_pylist(rows, schema=ACCEPTANCE)
    write_manifest(folder, key, [write_shard(folder / f"{key}.parquet", table)], {})


@pytest.fixture
def cfg(tmp_path):
    return load(None, [f"work={tmp_path}"])


@pytest.fixture
def measured(cfg):
    """A drafter replayed at K 1 to 7 and served at 4, better than a baseline; returns its walks."""
    ours = {k: walks(1, k, 0.7) for k in range(1, 8)}
    served = walks(2, SERVED_K, 0.7)
    for k, accepted in ours.items():
        publish(cfg, f"ours-{k}", accepted, OURS, k)
    publish(cfg, "theirs", walks(3, 7, 0.5), THEIRS, 7)
    publish(cfg, "served", served, OURS, SERVED_K, "served")
    evaluation = {
        "drafter": "sql-run-1",
        "weights_sha256": OURS,
        "target_id": "t1",
        "split": "test",
        "k": 7,
        "tau": {"pooled": tau(ours[7]), "ci": [2.111, 2.999]},
        "baseline": {
            "drafter": "sql-run-0",
            "weights_sha256": THEIRS,
            "tau": {"pooled": 2.0},
            "delta": 0.25,
            "delta_ci": [0.125, 0.375],
        },
    }
    verified = {
        "drafter": "sql-run-1",
        "k": SERVED_K,
        "k_by_batch_size": [SERVED_K, 3],
        "speedup": {"1": 1.625, "8": 1.125},
        "greedy": {"requests": 24, "identical": 23, "near_ties": 1, "different": 0},
        "reference": {"requests": 4, "identical": 3, "rounds": 40, "differing": []},
    }
    for folder, value in (("evaluations", evaluation), ("verified", verified)):
        cfg.path(folder).mkdir()
        cfg.path(folder, "one.json").write_text(json.dumps(value))
    return {"replay": ours, "served": served}


def headline(accepted, k, origin, ci="not computed"):
    return ["sql-run-1", origin, str(k), "0", f"{tau(accepted):.3f}", ci] + [
        f"{tau_macro(accepted):.3f}",
        str(num_rounds(accepted)),
        str(len(accepted)),
    ]


def test_headline_is_the_definition_applied_to_the_rows(cfg, measured, tmp_path):
    page = Page(write_report(cfg, tmp_path / "x" / "page.html").read_text())
    rows = [row for row in page.tables["headline"] if row]
    assert rows[:3] == [
        headline(measured["replay"][4], 4, "replay"),
        headline(measured["served"], 4, "served"),
        headline(measured["replay"][7], 7, "replay", "2.111 to 2.999"),
    ]
    assert [row[0] for row in rows[3:]] == ["sql-run-0"]
    assert f"gives {tau(measured['served']):.2f} tokens" in page.text


def test_pictures_show_replay_and_served_at_the_same_k(cfg, measured, tmp_path):
    page = Page(write_report(cfg, tmp_path / "page.html").read_text())
    assert page.figures == ["positions", "domains", "rounds", "k"]
    labels = [attrs.get("aria-label", "") for tag, attrs in page.tags if tag == "figure"]
    shares = [f"{rate:.0%}" for rate in positions(measured["replay"][SERVED_K], SERVED_K)]
    assert f"replay {', '.join(shares)}; served " in labels[0]
    assert f"{tau(measured['served']):.2f}" in page.text  # a bar's label: SVG text stays text


def test_champion_and_challenger_are_paired_by_sample(cfg, measured, tmp_path):
    decision = {"action": "promote", "model": "drafter", "to_drafter": THEIRS[:12]}
    promotions.append(cfg.path("promotions"), decision)
    page = Page(write_report(cfg, tmp_path / "page.html").read_text())
    assert "champion" in page.figures
    assert "sql-run-0 (champion)" in [row[0] for row in page.tables["headline"] if row]
    gain = tau(measured["replay"][7]) - tau(walks(3, 7, 0.5))
    assert f"{gain:+.2f}" in page.text


def test_comparison_serving_and_gaps_are_told(cfg, measured, tmp_path):
    text = Page(write_report(cfg, tmp_path / "page.html").read_text()).text
    assert "better, difference +0.250 (95% interval +0.125 to +0.375" in text
    assert "1.62x" in text
    assert "24 requests (general <script> 6, tickets 18), 288 rounds at K 7" in text
    assert "identical to replay in every round3" in text.replace("\n", "")
    assert "temperature > 0 not measured" in text


def test_page_is_self_contained_and_escapes_names_from_logs(cfg, measured, tmp_path):
    page = Page(write_report(cfg, tmp_path / "page.html").read_text())
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]
    outside = [v for _, attrs in page.tags for name, v in attrs.items() if name in ("src", "href")]
    assert outside == []


def test_same_rows_give_the_same_pictures(cfg, measured, tmp_path):
    pages = [write_report(cfg, tmp_path / name).read_text() for name in ("a.html", "b.html")]
    first, second = (page[page.index("<figure") : page.rindex("</figure>")] for page in pages)
    assert first == second


def test_without_measurements_the_page_says_what_to_run(cfg, tmp_path):
    text = Page(write_report(cfg, tmp_path / "page.html").read_text()).text
    assert "flywheel evaluate" in text
    assert "served: not measured." in text


def test_damaged_evaluation_is_named(cfg, measured, tmp_path):
    cfg.path("evaluations", "one.json").write_text('{"drafter": ')
    with pytest.raises(ValueError, match=r"evaluations/one.json is damaged"):
        write_report(cfg, tmp_path / "page.html")


def test_the_stage_writes_below_reports(cfg, measured):
    assert run(cfg)["report"] == str(cfg.path("reports", "report.html"))
