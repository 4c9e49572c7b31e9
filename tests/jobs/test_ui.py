"""`flywheel ui`: what its page says of a store, and that it only reads."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from jobs.base import cli
from jobs.base.config import load
from jobs.dataset import shard_sums
from jobs.dataset.queries import Question, ask_question, find_question
from jobs.looking import looks, sections, sources
from jobs.looking.looks import Looks
from jobs.looking.web_app import application
from jobs.registry.versions import Registry
from jobs.retraining.triggers import Trigger
from tests.helpers.store import fill

LABEL = "<b>bold</b> & \u202e`code`"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A healthy store; do not write to it."""
    return fill(load(None, [f"work={tmp_path_factory.mktemp('ui') / 'store'}"]))


@pytest.fixture
def copied(store, tmp_path):
    """A copy of it, as its settings."""
    return load(None, [f"work={shutil.copytree(store.work, tmp_path / 'work')}"])


@pytest.fixture
def watched(monkeypatch):
    """The store has no target; this is what the triggers see."""
    seen = [Trigger(f"drift of {LABEL}", "-8.0%", "-5.0%", True, f"requests of {LABEL}")]
    monkeypatch.setattr(sections, "look", lambda cfg, policy: seen)


def look(cfg, folder):
    """(sections by name, the page) after one look."""
    one = Looks(cfg, folder)
    one.look()
    with TestClient(application(cfg, one), base_url="http://localhost:8900") as client:
        return one.sections, client.get("/").text


def cells(section, caption):
    [found] = [g for g in section.grids if g.caption.startswith(caption)]
    names = [name for name, _ in found.columns]
    return [dict(zip(names, row, strict=True)) for row in found.rows]


def ask(cfg, name):
    return ask_question(cfg, Question.read(find_question(name)), {}).to_pylist()


def files(folder):
    """Everything below a folder, as anyone who writes there would change it."""
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(folder).rglob("*")
    }


def test_the_page_has_the_numbers_of_the_questions(copied, tmp_path, watched):
    found, page = look(copied, tmp_path / "own")
    assert [s.fault for s in found.values()] == [""] * len(sections.SECTIONS)
    cards = {card.about: card for card in found["now"].cards}
    assert cards["champion"].fact == "version 2"
    assert cards["tau, replayed"].fact == "2.310"
    assert "2.200 to 2.420; +0.210 over the champion before" in cards["tau, replayed"].more
    days = [r for r in ask(copied, "tau_by_day") if r["domain"] == "(all)"]
    assert cards["tau, served"].fact == f"{days[-1]['tau_tokens_per_round']:.3f}"
    assert cards["last window"].fact == "1: promoted"
    assert cards["last roll-out"].fact == "version 2: advance"
    [window] = cells(found["windows"], "The newest first")
    [gained] = ask(copied, "gain_of_windows")
    assert window["served gain"] == f"{gained['served_gain']:+.1%}"
    assert window["predicted gain (95%)"] == "+15.0% (+10.0% to +20.0%)"
    [_, chat] = cells(found["canary"], "Canary against the rest")
    assert (chat["against the rest"], chat["interval"]) == ("+4.0%", "-1.0% to +9.0%")
    decisions = cells(found["champions"], "The newest first")
    assert [d["action"] for d in decisions] == [
        "rollout-advance",
        "rollout-canary",
        "promote",
        "promote",
    ]
    assert len(found["acceptance"].pictures) == 3
    assert page.count("<svg") == 4
    assert all(f'id="{name}"' in page for name in sections.SECTIONS)


def test_text_from_outside_is_text(copied, tmp_path, watched):
    """The triggers name domains; a label may be anything."""
    found, page = look(copied, tmp_path / "own")
    assert LABEL.split()[0] in found["triggers"].warnings[0]
    assert "<b>" not in page
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; \\u202e" in page


def test_looking_writes_nothing(fleet_base, tmp_path, store):
    """The registry is an SQLite file, and opening it in place would leave a lock beside it."""
    work = shutil.copytree(fleet_base, tmp_path / "work")
    for name in ("acceptance", "windows", "traffic", "logs"):
        shutil.copytree(Path(store.work) / name, work / name)
    (work / ".mlflow.db.lock").unlink(missing_ok=True)
    before, cfg = files(work), load(None, [f"work={work}"])
    found, _ = look(cfg, tmp_path / "own")
    assert files(work) == before
    assert found["now"].fault == found["triggers"].fault == ""
    assert not any("champion of the registry" in w for w in found["now"].warnings)
    assert {g.caption for g in found["triggers"].grids} == {"Triggers of the policy"}
    # An alias that somebody moved by hand.
    registry = Registry(cfg)
    registry.client.set_registered_model_alias(cfg.mlflow.model, "champion", "1")
    found, _ = look(cfg, tmp_path / "own")
    [said] = [w for w in found["now"].warnings if "champion of the registry" in w]
    assert "is version 1, that of the decisions is 2" in said


def test_an_empty_work_folder_says_what_to_run_first_and_stays_absent(tmp_path):
    cfg = load(None, [f"work={tmp_path / 'absent'}"])
    found, page = look(cfg, tmp_path / "own")
    assert "Run `flywheel ingest` first" in found["now"].text[0]
    assert [s.fault for s in found.values()] == [""] * len(sections.SECTIONS)
    assert "<code>flywheel ingest</code>" in page
    assert not (tmp_path / "absent").exists()


def test_a_damaged_table_costs_its_sections_only(copied, tmp_path, watched):
    for file in Path(copied.work, "windows", "_delta_log").glob("*.json"):
        file.write_text("{broken")
    found, _ = look(copied, tmp_path / "own")
    faults = {name: s.fault for name, s in found.items() if s.fault}
    assert set(faults) == {"windows", "triggers"}
    assert f"restore {copied.place('windows')} from a backup" in faults["windows"]
    assert any(w.startswith("table windows: ") for w in found["now"].warnings)
    bad = [card.about for card in found["now"].cards if card.bad]
    assert bad == ["last window"]
    assert "windows (cannot be read)" in [r["name"] for r in cells(found["data"], "What takes")]


def test_without_decisions_acceptance_is_still_shown(copied, tmp_path, watched):
    for file in Path(copied.work, "promotions", "_delta_log").glob("*.json"):
        file.write_text("{broken")
    found, _ = look(copied, tmp_path / "own")
    assert {name for name, s in found.items() if s.fault} == {"canary", "champions"}
    assert len(found["acceptance"].pictures) == 2


def test_a_damaged_shard_costs_what_reads_it(copied, tmp_path, watched):
    for file in Path(copied.work, "acceptance").glob("*.parquet"):
        file.write_bytes(b"PAR1 no more")
    found, _ = look(copied, tmp_path / "own")
    assert {n for n, s in found.items() if s.fault} == {"acceptance", "windows", "triggers"}
    assert found["champions"].grids
    assert found["canary"].grids


def test_summaries_of_other_commands_are_used(copied, tmp_path, watched, monkeypatch):
    ask(copied, "tau_by_day")
    made = files(copied.path("summaries"))
    assert made

    def again(*rest):
        raise AssertionError("summed up again")

    monkeypatch.setattr(shard_sums, "_sum_up", again)
    found, _ = look(copied, tmp_path / "own")
    assert found["acceptance"].pictures
    assert files(copied.path("summaries")) == made


def test_a_work_folder_in_a_bucket(s3_env, tmp_path, watched):
    cfg = fill(load(None, [f"work={s3_env.url()}", f"scratch={tmp_path / 'scratch'}"]))
    found, _ = look(cfg, tmp_path / "own")
    assert [s.fault for s in found.values()] == [""] * len(sections.SECTIONS)
    assert found["now"].cards[0].fact == "version 2"
    assert not (tmp_path / "scratch").exists()


def test_replicas_say_what_they_draft_with(start_fleet, tmp_path):
    with start_fleet({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5}) as world:
        found, _ = look(world.cfg, tmp_path / "own")
        cards = {card.about: card for card in found["now"].cards}
        assert cards["fleet"].fact == "0 of 2 draft with the champion"
        assert cards["fleet"].more.count(f": 1/{world.sha['1'][:12]}") == 2
        assert {call.split()[0] for fake in world.fakes for call in fake.calls} <= {"GET"}
    found, _ = look(world.cfg, tmp_path / "own")
    assert sum("a replica does not answer" in w for w in found["now"].warnings) == 2


def test_a_question_that_takes_too_long_is_stopped(copied, tmp_path, watched, monkeypatch):
    monkeypatch.setattr(sources, "SECONDS", 0.2)
    endless = "select count(*) as n from range(1000000000) a, range(1000) b where a.range % 7 = 3"
    monkeypatch.setattr(sections, "LATELY", endless)
    monkeypatch.setattr(sections, "SECTIONS", {"commands": sections.SECTIONS["commands"]})
    monkeypatch.setattr(looks, "SECTIONS", sections.SECTIONS)
    one = Looks(copied, tmp_path / "own")
    one.look()
    assert "took longer than 0.2 s here" in one.sections["commands"].fault


def test_no_space_for_what_a_reader_writes_is_said(copied, tmp_path):
    (tmp_path / "own").write_text("in the way")
    found, page = look(copied, tmp_path / "own")
    assert list(found) == ["now"]
    assert found["now"].fault in page.replace("&#39;", "'")
    assert str(tmp_path / "own") in found["now"].fault


def test_nobody_waits_for_a_slow_look(store, tmp_path, monkeypatch):
    go, begun = threading.Event(), []

    def slow(seen, section):
        begun.append(section.name)
        assert go.wait(20)

    monkeypatch.setattr(looks, "SECTIONS", {"now": ("Now", slow)})
    one = Looks(store, tmp_path / "own", patience=0.1)
    with TestClient(application(store, one), base_url="http://localhost:8900") as client:
        started = time.monotonic()
        pages = [client.get("/").text for _ in range(3)]
        assert time.monotonic() - started < 5
        assert all("Reading the tables" in page for page in pages)
        assert all('http-equiv="refresh"' in page for page in pages)
        go.set()
        one.patience = 20
        assert not one.refresh()
        assert "Reading the tables" not in client.get("/").text
    one.close()
    assert not one.refresh(), "closed: no look begins any more"
    assert begun == ["now"], "one look at a time, and no new one within half a minute"


def test_only_known_hosts_are_answered_and_nothing_can_be_sent(store, tmp_path):
    cfg = load(None, [f"work={store.work}", "ui.host=0.0.0.0", "ui.names=[desk.example]"])
    one = Looks(cfg, tmp_path / "own")
    one.look()
    app = application(cfg, one)
    status = {
        host: TestClient(app, base_url=f"http://{host}").get("/").status_code
        for host in ("localhost:8900", "127.0.0.1", "[::1]:8900", "desk.example:80", "evil.example")
    }
    assert status.pop("evil.example") == 400
    assert set(status.values()) == {200}
    client = TestClient(app, base_url="http://localhost")
    assert client.post("/").status_code == 405
    assert client.get("/../traffic").status_code == 404
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert "<script" not in answer.text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", answer.text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.com"])
def test_another_interface_is_refused_unless_asked_for(host, capsys):
    assert cli.main(["ui", f"ui.host={host}"]) == 2
    assert "the page has no password" in capsys.readouterr().err
    assert load(None, [f"ui.host={host}", "ui.names=[desk]"]).ui.host == host


def test_the_command_prints_its_address_and_ends_with_ctrl_c(store):
    """Also while it looks: an open database would abort the interpreter at its end."""
    command = [sys.executable, "-m", "jobs.ui", f"work={store.work}", "ui.port=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as running:
        assert running.stderr is not None
        line = running.stderr.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+) shows ", line)
        assert found, line
        page = _get(found[1])
        assert "<h1>Flywheel</h1>" in page
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert json.loads(out) == {"stage": "ui", "url": found[1]}


def _get(url):
    for _ in range(100):
        try:
            return httpx.get(url, timeout=30).text
        except httpx.ConnectError:  # it prints its address before it listens
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")
