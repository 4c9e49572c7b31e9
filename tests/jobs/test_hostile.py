"""Whatever clients write into their labels: every stage runs, and shows the label as plain text."""

import contextlib
import io
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

from jobs import doctor, methods
from jobs.base import cli
from jobs.base.checks import Check, print_checks
from jobs.base.console import NAME, console, print_table, short_name, some_names, visible
from jobs.dataset.slices import SHOWN, largest, largest_rows, slices
from jobs.machine import resources
from jobs.promotion import gate
from jobs.promotion.gate_rules import read_rules
from jobs.proof import verify_table
from jobs.reporting import plotting
from store.labels import clean
from tests.helpers.promotion import part
from tests.helpers.work import RIVAL_SETTINGS
from tests.jobs.dataset.test_slices import row

LABELS = [
    "[/v1/help]",
    "[beta] billing",
    r"$\foo$",
    "</script><b>x",
    """a'b"c""",
    "../../x",
    "\u202eabc",
    "\x1b[31mred",
    "x" * 5000,
    "",
    "b\u00fcro",
    "%s {x}",
    "a\nb\tc",
    "_private :smile: \U0001f600",
    "(all)",
    "#0072b2",
]
NAMED = [clean(label) or "default" for label in LABELS]
FOLDER = "w [bold]x[/] 'a' {b} :smile:"
STAGES = {
    "ingest": ["ingest.test_percent=99"],
    "select": [],
    "harvest": [],
    "evaluate": [],
    "promote": [],
    "report": [],
    "sql": ["tau_by_domain_and_version"],
    "doctor": [],
    "again": ["ingest.val_percent=60", "ingest.test_percent=0"],
    "select-again": ["ingest.val_percent=60", "ingest.test_percent=0"],
    "plan": ["--plan"],
    "train": [],
}
COMMANDS = {"again": "ingest", "select-again": "select", "plan": "train"}
TRAINING = ["train.steps=2", "train.val_every=1", "train.max_slice_loss=1"]


@pytest.fixture(scope="module")
def told(tmp_path_factory, rivals):
    """{stage: (exit code, summary, what people see)}: the loop over traffic with these labels."""
    work = shutil.copytree(rivals, tmp_path_factory.mktemp("hostile") / FOLDER)
    for name in ("traffic", "logs", "rejects", "selection"):  # the same samples, other labels
        shutil.rmtree(work / name, ignore_errors=True)
    log = work / "capture" / "log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) == len(LABELS)
    for record, label in zip(records, LABELS, strict=True):
        record |= {"domain": label, "language": label, "tenant": label}
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    gate_file = work / "gate.yaml"
    gate_file.write_text("tau: {min: 1}\ngain: {min: -5}\nspeed: {required: false}\n")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "CHECKS", [resources.room, resources.port])
        for stage, more in STAGES.items():
            if stage == "again":  # an earlier selection would keep its samples on their sides
                shutil.rmtree(work / "selection")
            out, err = io.StringIO(), io.StringIO()
            settings = [
                f"work={work}",
                *RIVAL_SETTINGS,
                *TRAINING,
                f"promote.gate={gate_file}",
                *more,
            ]
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.main([COMMANDS.get(stage, stage), *settings])
            found[stage] = (code, json.loads(out.getvalue() or "null"), err.getvalue())
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_hostile_labels_stop_no_stage(told, stage):
    code, _, seen = told[stage]
    assert code == 0, seen
    assert "\x1b[31m" not in seen
    assert "\u202e" not in seen


@pytest.mark.parametrize("stage", ["ingest", "evaluate"])
def test_tables_show_labels_as_they_are(told, stage):
    _, _, seen = told[stage]
    for label in NAMED:
        wanted = visible(label) if len(label) < NAME else label[:8]
        assert wanted in seen, wanted


def test_the_json_line_keeps_every_label_exactly(told):
    """In the Unicode form that ingest gives it."""
    assert set(told["ingest"][1]["domains"]) == set(NAMED)
    evaluation = told["evaluate"][1]
    tau = evaluation["tau"]
    assert set(tau["domains"]) == set(tau["slices"]["domain"]) == set(NAMED)
    rows = told["sql"][1]["rows"]
    domain = told["sql"][1]["columns"].index("domain")
    assert {r[domain] for r in rows} >= {*NAMED} - {"(all)"}


def test_a_client_that_calls_its_domain_all_does_not_become_the_total(told):
    columns, rows = told["sql"][1]["columns"], told["sql"][1]["rows"]
    found = [dict(zip(columns, r, strict=True)) for r in rows]
    key = ("origin", "drafter_version", "k", "temperature")
    totals = [tuple(r[name] for name in key) for r in found if r["domain"] == "(all)"]
    assert len(totals) == len(set(totals))
    assert any(r["domain"] == '"(all)"' for r in found)


def test_the_page_escapes_every_label(told):
    page = Path(told["report"][1]["report"]).read_text()
    assert "</script>" not in page
    assert "<b>x" not in page
    assert not {"\x1b", "\u202e"} & set(page)
    assert "\ufffd[31mred" in page
    assert "\\u202eabc" in page
    assert "\u200b" not in page
    assert "x" * NAME not in page
    assert "[beta] billing" in page
    assert len(page) < 300_000


def test_slices_sort_whatever_a_label_says():
    labels = [*NAMED, "1..x", "..", "0", "5", "\u0663..", "nan..", "1e999..2"]
    found = slices([row(label) for label in labels], [[1]] * len(labels))
    assert set(found["domain"]) == set(labels)


def test_ten_thousand_labels_are_all_counted_and_few_are_shown(capsys):
    counts = {f"d{i}": [1 + (i == 7), 1] for i in range(10_000)}
    rows = largest_rows(counts)
    assert len(rows) == SHOWN + 1
    assert ["d7", 2, 1] in rows
    assert rows[-1][0] == f"({10_000 - SHOWN} smaller ones)"
    assert sum(r[1] + r[2] for r in rows) == 20_001
    assert len(largest({name: 1 for name in counts})) == SHOWN
    assert some_names(counts).endswith("and 9990 more")
    print_table("t", ["domain"], ([name] for name in counts))
    seen = capsys.readouterr().err
    assert "and 9800 more rows" in seen
    assert seen.count("\n") < 250


def test_tables_of_stages_with_servers_take_any_text(capsys):
    checks = [Check(label or "x", label, "fail", label) for label in NAMED]
    print_checks("Preflight of [/b]", checks)
    taus = {"pooled": 2.0, "domains": dict.fromkeys(NAMED, 2.0), "positions": [0.5]}
    speed = {"concurrency": 1, "plain": [1.0, 2.0], "drafted": [2.0], "ratio": 2.0, "ratios": [2.0]}
    read = {"lost": 0, "tokens": 1, "largest_gap": 0.0}
    greedy = {"requests": 1, "identical": 1, "near_ties": 0, "different": 0}
    names = ("requests", "identical_rounds", "near_ties", "differing_rounds")
    verify_table.show(
        {
            "tau_replay": taus,
            "tau_served": taus,
            "k": 1,
            "predicted": {},
            "k_by_batch_size": [1],
            "k_by_slice": {f"domain {label}": [1] for label in NAMED},
            "speeds": [speed],
            "servers_at_once": 2,
            "greedy": greedy | {"control": read, "drafted": read},
            "comparison": dict.fromkeys(names, 0) | {"differences": [], "left_out": []},
            "reference": {"skipped": "[/b] no room"},
            "faults": ["[/b] \x1b[31m"],
        }
    )
    none = {"method": "none", "settings": {}, "available": True, "tau": taus, "speeds": []}
    failed = {"method": "ngram", "available": False, "reason": "[/b] \x1b[31m"}
    methods.show({"requests": 1, "speed_domain": "[/b]", "methods": [none, failed]})
    seen = capsys.readouterr().err
    assert "[/v1/help]" in seen
    assert "domain [beta] billing alone" in seen
    assert "\x1b[31m" not in seen


def test_a_refusal_names_the_domain_readably():
    label = "\x1b[31m" + "x" * 5000
    lost = part(label, 2.0, -1.0)
    found = gate.loss("domain", read_rules("").domains, lost)
    assert found.reason.startswith(f"domain {short_name(label)}: a loss of more than")
    assert len(found.reason) < 200
    rare = gate.loss("domain", read_rules("").domains, lost | {"name": "", "members": [label] * 99})
    assert "\x1b" not in rare.reason
    assert len(rare.reason) < 300


@pytest.mark.parametrize("label", NAMED)
def test_pictures_take_any_label_and_show_it(label):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that is missing here, a legend without entries
        drawn = [
            plotting.bars_by_domain({"replay": {label: 2.0}, "served": {label: 2.1}}),
            plotting.forest({label: [(label, 2.0, [1.0, 3.0])]}, "tau", 1.0, {label: {label: 1.5}}),
            plotting.training_curves([(1, 2.0), (2, 1.0)], {label: [(1, 1.5), (2, 1.7)]}),
        ]
    for svg in drawn:
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert any(shown(label) == unescape(text).strip() for text in texts), texts
        assert "<script" not in svg


def shown(label):
    return visible(label, plotting.LONGEST).strip()


def unescape(text):
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def test_colors_of_a_picture_follow_the_theme_and_labels_do_not():
    svg = plotting.bars_by_domain({"replay": {plotting.BLUE: 2.0}})
    assert f">{plotting.BLUE}</text>" in svg
    assert f"var(--blue, {plotting.BLUE})" in svg
    assert svg.count(plotting.BLUE) - svg.count(f"var(--blue, {plotting.BLUE})") == 1


def test_long_names_stay_apart_when_they_are_cut():
    long = ["x" * 5000 + end for end in ("a", "b")]
    assert len({short_name(text) for text in long}) == 2
    assert {len(short_name(text)) for text in long} == {NAME}
    assert short_name("x" * NAME) == "x" * NAME


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\x1b[31mb\x07", r"a\x1b[31mb\x07"),
        ("a\u202eb\u2028\xa0", r"a\u202eb\u2028\xa0"),
        ("\ud800", r"\ud800"),
        ("\u5f20 \u05d0 \U0001f600", "\u5f20 \u05d0 \U0001f600"),
        ("  ", "'  '"),
        ("", ""),
    ],
)
def test_characters_that_do_not_print_are_seen(text, seen):
    assert visible(text) == seen


def test_messages_are_printed_as_they_are(capsys):
    console.print("report: /data/[/b]/x :smile: [red]", style="yellow")
    console.rule("[/b]")
    print_table("[/b]", ["[/c]"], [["[/d] :smile:"]])
    seen = capsys.readouterr().err
    assert "report: /data/[/b]/x :smile: [red]\n" in seen
    assert "[/b]" in seen
    assert "[/c]" in seen
    assert "[/d] :smile:" in seen


MARKUP = re.compile(r"\[/?(bold|italic|red|green|yellow|blue)\b[^\]\n]*\]|\[/\]")


def test_only_the_console_knows_the_library_and_nobody_writes_its_markup():
    """With markup off a style in brackets would be printed; with it on, a label would be read."""
    root = Path(__file__).parents[2]
    folders = ("jobs", "pipelines", "bench")
    for path in (p for folder in folders for p in (root / folder).glob("**/*.py")):
        text = path.read_text()
        assert not MARKUP.search(text), f"{path}: use style="
        knows = re.search(r"^\s*(from|import) rich", text, re.MULTILINE)
        assert not knows or path.name == "console.py", f"{path}: print through jobs/base/console.py"
