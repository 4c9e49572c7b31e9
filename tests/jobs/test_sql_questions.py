"""Every question of sql/ over a store with rows in every table."""

import io
import json
import sys
from datetime import UTC, datetime, timedelta

import pyarrow.parquet as pq
import pytest
from pyarrow.csv import read_csv

from dflash import acceptance
from jobs.base import cli
from jobs.base.config import load
from jobs.dataset import queries
from jobs.evaluation.intervals import Resamples
from store.ids import drafter_version
from store.schemas import ACCEPTANCE
from tests.helpers.store import DAY, DAYS, KEY, NEW, OLD, fill
from tests.helpers.tables import add_rows

GIVEN = {
    "lineage": ["drafter=bbbbbbbbbbbb"],
    "savings": ["price_per_hour=36"],
    "worst_domains": ["min_rounds=100"],
    "worst_prompts": ["drafter=bbbbbbbbbbbb"],
}
"""Parameters without a default, and one whose default leaves out all of so small a store."""


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return fill(load(None, [f"work={tmp_path_factory.mktemp('store')}"]))


@pytest.fixture(scope="module")
def rows(cfg):
    return cfg.table("acceptance").read().to_pylist()


def ask(cfg, name, **parameters):
    question = queries.Question.read(queries.find_question(name))
    given = dict(word.split("=") for word in GIVEN.get(name, [])) | parameters
    return queries.ask_question(cfg, question, given).to_pylist()


def replayed(rows, sha256=NEW, k=7, origin="replay", **where):
    """Measured rows of a drafter, in the order of their samples."""
    where |= {"drafter_version": drafter_version(sha256), "k": k, "origin": origin, "log": None}
    mine = [row for row in rows if all(row[n] == v for n, v in where.items())]
    return sorted(mine, key=lambda row: row["sample_id"])


def walks(rows):
    return [row["accepted"] for row in rows]


@pytest.mark.parametrize("name", [question.name for question in queries.questions()])
def test_a_question_says_how_to_read_it_and_has_an_answer(cfg, name, capsys):
    assert cli.main(["sql", name, f"work={cfg.work}", *GIVEN.get(name, [])]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["rows"]
    assert len(set(found["columns"])) == len(found["columns"])
    question = queries.Question.read(queries.find_question(name))
    assert question.title.endswith("?")
    assert len(question.comment) > len(question.title)
    assert question.title.split()[0] in err


@pytest.mark.parametrize("name", [question.name for question in queries.questions()])
def test_a_question_about_an_empty_table_says_what_fills_it(tmp_path, name, capsys):
    assert cli.main(["sql", name, f"work={tmp_path}", *GIVEN.get(name, [])]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] == []
    if name != "storage":  # it asks about all of them
        assert "is empty; `flywheel " in err


def test_intervals_have_the_standard_error_of_the_evaluation(cfg, rows):
    mine, before = replayed(rows), replayed(rows, OLD)
    draws = Resamples([row["conversation_id"] for row in mine], 100)
    assert draws.size == 19
    student = 2.101  # for 18 degrees of freedom
    one = draws.tau(walks(mine), 7)
    assert one.error is not None
    found = [r for r in ask(cfg, "k_sweep") if (r["domain"], r["k"]) == ("(all)", 7)][1]
    assert found["tau_tokens_per_round"] == pytest.approx(one.value)
    assert found["tau_high"] - one.value == pytest.approx(student * one.error, rel=0.01)
    gain = draws.tau_gain(walks(before), walks(mine), 7)
    assert gain.error is not None
    [row] = [r for r in ask(cfg, "champion_vs_challenger") if (r["domain"], r["k"]) == ("(all)", 7)]
    assert row["gain_tokens_per_round"] == pytest.approx(gain.value)
    half = (row["gain_high"] - row["gain_low"]) / 2
    assert half == pytest.approx(student * gain.error, rel=0.01)


def test_intervals_count_conversations_and_not_requests(tmp_path):
    """Each request written three times: the conversations, and so the interval, stay the same."""
    cfg = load(None, [f"work={tmp_path}"])
    base = dict.fromkeys(ACCEPTANCE.names) | {"origin": "replay", "drafter_version": "d", "k": 3}
    found = [
        base
        | {"request_id": f"{i}", "conversation_id": f"c{i}", "domain": "a", "target_id": "t"}
        | {"accepted": [i % 4, 1], "drafted": [3, 3]}
        for i in range(40)
    ]
    add_rows(cfg, "acceptance", found)
    [once] = [r for r in ask(cfg, "k_sweep") if r["domain"] == "a"]
    add_rows(cfg, "acceptance", found + found)
    [thrice] = [r for r in ask(cfg, "k_sweep") if r["domain"] == "a"]
    assert thrice["rounds"] == 3 * once["rounds"]
    assert thrice["tau_low"] == pytest.approx(once["tau_low"])
    few = {**base, "conversation_id": "c", "domain": "few", "accepted": [1], "drafted": [3]}
    add_rows(cfg, "acceptance", [few, few])
    [row] = [r for r in ask(cfg, "k_sweep") if r["domain"] == "few"]
    assert (row["tau_tokens_per_round"], row["tau_low"]) == (2.0, None)


def test_days_of_production_are_pooled_by_drafter_and_domain(cfg, rows):
    found = ask(cfg, "tau_by_day", days="2")
    assert {row["day"] for row in found} == {(DAY + timedelta(days=n)).date() for n in (2, 3)}
    day = (DAY + timedelta(days=3)).date()
    mine = [
        r for r in rows if r["log"] and r["finished_at"].date() == day and r["domain"] == "code"
    ]
    [row] = [r for r in found if (r["day"], r["domain"]) == (day, "code")]
    assert row["tau_tokens_per_round"] == pytest.approx(acceptance.tau(walks(mine)))
    assert row["requests"] == len(mine)
    drafts = sum(sum(r["drafted"]) for r in mine) / sum(len(r["drafted"]) for r in mine)
    assert row["drafts_per_round"] == pytest.approx(drafts)


def test_production_is_compared_with_replay_at_the_same_position(cfg, rows):
    found = {
        (r["drafter_version"], r["domain"], r["position"]): r
        for r in ask(cfg, "production_vs_replayed")
    }
    served = [r for r in rows if r["log"] and r["drafter_version"] == NEW[:12]]
    offered = [
        a >= 5 for r in served for a, d in zip(r["accepted"], r["drafted"], strict=True) if d >= 5
    ]
    row = found[NEW[:12], "(all)", 5]
    assert row["production_rounds"] == len(offered)
    assert row["production_accept_rate"] == pytest.approx(sum(offered) / len(offered))
    rate = acceptance.positions(walks(replayed(rows)), 7)[4]
    assert row["replayed_accept_rate"] == pytest.approx(rate)
    assert row["difference"] == pytest.approx(sum(offered) / len(offered) - rate)


def test_served_requests_are_paired_with_their_replay(cfg, rows):
    [row] = [r for r in ask(cfg, "served_vs_replayed") if r["domain"] == "(all)"]
    served = replayed(rows, origin="served")
    assert row["pairs"] == len(served)
    gap = acceptance.tau(walks(served)) - acceptance.tau(walks(replayed(rows)))
    assert row["gap_tokens_per_round"] == pytest.approx(gap)
    assert row["gap_low"] < gap < row["gap_high"]


def test_the_canary_has_the_numbers_of_its_last_decision(cfg):
    first, second = sorted(ask(cfg, "canary_vs_rest"), key=lambda row: row["domain"])
    assert (first["domain"], second["domain"]) == ("(all others)", "chat")
    assert (second["rollout"], second["state"], second["canary"]) == (
        3,
        "advance",
        "http://east:8000",
    )
    assert second["canary_accept_rate"] == pytest.approx(410 / 700)
    assert (second["low"], second["high"], second["answer"]) == (-0.01, 0.09, "advance")


def test_savings_follow_from_measured_speed_and_the_price(cfg):
    one, eight = ask(cfg, "savings")
    assert (one["tokens_per_second_without"], one["tokens_per_second_with"]) == (100, 200)
    assert one["price_per_million_without"] == pytest.approx(100.0)  # 36 an hour, 360000 tokens
    assert one["price_per_million_with"] == pytest.approx(50.0)
    assert one["saved_per_hour"] == pytest.approx(18.0)
    assert eight["saved_per_hour"] == pytest.approx(36 * (1 - 1 / 1.333))


def test_storage_counts_a_file_once(cfg):
    found = {row["name"]: row for row in ask(cfg, "storage", price_per_gib_month="2")}
    features = found[KEY]
    assert (features["files"], features["gib"]) == (DAYS, DAYS * 90_000_000 / 2**30)
    assert features["price_per_month"] == pytest.approx(2 * features["gib"])
    shards = cfg.table("acceptance").shards().values()
    assert found["acceptance"]["rows"] == sum(shard.rows for shard in shards)


def test_k_by_load_says_what_verify_predicted_and_chose(cfg):
    found = ask(cfg, "k_by_load")
    assert [(r["batch"], r["k"]) for r in found if r["is_best"]] == [(1, 7), (8, 3)]
    assert {r["batch"]: r["served_k"] for r in found} == {1: 7, 8: 3}


def test_the_lineage_of_a_drafter_is_in_order_of_time(cfg):
    found = ask(cfg, "lineage")
    events = ["train", "evaluate", "preflight", "verify", "promote"]
    assert [r["event"] for r in found] == [*events, "rollout-canary", "rollout-advance", "served"]
    assert f"base {OLD[:12]}" in found[0]["detail"]
    assert ask(cfg, "lineage", drafter="' or true --") == []


def test_candidates_for_adaptation_are_below_the_others(cfg, rows):
    found = [r for r in ask(cfg, "adaptation_candidates") if r["drafter_version"] == NEW[:12]]
    assert found[0]["domain"] == "math"
    served = [r for r in rows if r["log"] and r["drafter_version"] == NEW[:12]]
    taus = [
        acceptance.tau(walks([r for r in served if (r["domain"] == "math") == is_math]))
        for is_math in (True, False)
    ]
    assert [found[0]["tau_tokens_per_round"], found[0]["tau_of_others"]] == pytest.approx(taus)
    share = (1 - taus[0] / taus[1]) * found[0]["share_of_rounds"]
    assert found[0]["saved_rounds_share"] == pytest.approx(share)
    assert found[0]["train_tokens"] >= found[0]["selected_tokens"] > 0


def test_coverage_counts_what_became_of_the_records(cfg):
    found = ask(cfg, "capture_coverage")
    assert [(r["records"], r["used"], r["not_used"], r["rejected"]) for r in found] == [
        (51, 48, 2, 1)
    ] * DAYS
    assert {r["rounds_share"] for r in found} == {1.0}
    reasons = ask(cfg, "rejected_records")
    assert [(r["class"], r["reason"], r["records"]) for r in reasons] == [
        ("not used", "no_consent", 2 * DAYS),
        ("rejected", "not_json", DAYS),
    ]
    assert reasons[0]["example"] == "capture/day-0.jsonl:99"


def hours(cfg, shares, rates):
    """Two times 24 hours: shares and rates of acceptance at the one position, by domain."""
    found, rounds = [], 1000
    for side in (0, 1):
        for hour in range(24):
            for domain in ("a", "b"):
                count = int(rounds * shares[side][domain])
                hits = int(count * rates[side][domain])
                found.append(
                    dict.fromkeys(ACCEPTANCE.names)
                    | {"domain": domain, "drafter_version": "d", "target_id": "t", "k": 1}
                    | {"log": "l", "replica": "r", "request_id": f"{side}-{hour}-{domain}"}
                    | {"accepted": [1] * hits + [0] * (count - hits), "drafted": [1] * count}
                    | {"finished_at": datetime(2026, 1, 1 + side, hour, tzinfo=UTC)}
                )
    add_rows(cfg, "acceptance", found)
    return {r["domain"]: r for r in ask(cfg, "drift", hours="24", days="1", k="1")}


def test_a_changed_mix_is_told_from_a_changed_domain(tmp_path):
    even, rates = {"a": 0.5, "b": 0.5}, {"a": 0.8, "b": 0.4}
    mix = load(None, [f"work={tmp_path / 'mix'}"])
    found = hours(mix, [even, {"a": 0.2, "b": 0.8}], [rates, rates])
    assert found["(all)"]["change"] == pytest.approx(-0.12)
    assert found["(all)"]["change_by_mix"] == pytest.approx(-0.12)
    assert found["(all)"]["change_within_domains"] == pytest.approx(0, abs=1e-9)
    assert found["a"]["change"] == pytest.approx(0, abs=1e-9)
    slice_ = load(None, [f"work={tmp_path / 'slice'}"])
    found = hours(slice_, [even, even], [rates, {"a": 0.8, "b": 0.2}])
    assert found["(all)"]["change"] == pytest.approx(-0.1)
    assert found["(all)"]["change_by_mix"] == pytest.approx(0, abs=1e-9)
    assert found["b"]["change"] == pytest.approx(-0.2)
    assert found["b"]["change_high"] < 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["drift", "hour=3"], "drift has no parameter 'hour': did you mean hours?"),
        (["drift", "price=3"], "it has hours=24 days=7 k=3"),
        (["where_rounds_end", "days=3"], "where_rounds_end has no parameter 'days': it has none"),
        (["savings"], "savings needs price_per_hour: `flywheel sql savings price_per_hour=VALUE`"),
        (["savings", "price_per_hour=much"], "Could not convert string 'much' to DOUBLE"),
    ],
)
def test_a_wrong_parameter_is_one_message_with_the_fix(cfg, words, told, capsys):
    assert cli.main(["sql", *words, f"work={cfg.work}"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("error:") == 1


def test_parameters_of_an_own_file_are_bound_and_never_pasted(cfg, tmp_path, capsys):
    own = tmp_path / "own.sql"
    own.write_text(
        "select count(*) as n, any_value($who::varchar) as who from promotions where who = $who"
    )
    evil = "x'; drop view promotions; --, [1] \u202e"
    assert cli.main(["sql", str(own), f"who={evil}", f"work={cfg.work}"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0] == [0, None]
    assert cli.main(["sql", str(own), "who=me@host", f"work={cfg.work}"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0] == [4, "me@host"]
    assert cli.main(["sql", str(own), f"work={cfg.work}"]) == 2
    assert "own needs who" in capsys.readouterr().err


def test_csv_json_and_parquet_are_the_answer_and_nothing_else(cfg, capfdbinary):
    asked = ["sql", "tau_by_day", f"work={cfg.work}", "days=1", "--format"]
    wanted = ask(cfg, "tau_by_day", days="1")
    assert cli.main([*asked, "csv"]) == 0
    table = read_csv(io.BytesIO(capfdbinary.readouterr().out))
    assert table["tau_tokens_per_round"].to_pylist() == pytest.approx(
        [r["tau_tokens_per_round"] for r in wanted], abs=1e-6
    )
    assert cli.main([*asked, "json"]) == 0
    found = json.loads(capfdbinary.readouterr().out)
    assert [r["rounds"] for r in found] == [r["rounds"] for r in wanted]
    assert cli.main([*asked, "parquet"]) == 0
    assert pq.read_table(io.BytesIO(capfdbinary.readouterr().out)).to_pylist() == wanted
    assert cli.main([*asked, "xml"]) == 2
    assert cli.main(["doctor", f"work={cfg.work}", "--format", "csv"]) == 2


def test_questions_are_listed_with_their_parameters(cfg, capsys):
    assert cli.main(["sql", f"work={cfg.work}"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["questions"] == [question.name for question in queries.questions()]
    assert "price_per_hour=..." in err
    assert "hours=24 days=7 k=3" in err


def test_the_shell_answers_statements_over_lines_and_goes_on_after_errors(cfg, monkeypatch, capsys):
    lines = ["select ';' as a,", "  count(*) as n -- ;", "from acceptance_requests;"]
    lines += ["selec 1;", "create macro twice(x) as 2 * x;", "select twice(21) as answer;"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, ".quit", "select 99;"])))
    assert cli.main(["sql", "shell", f"work={cfg.work}"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    count = queries.ask(cfg, "select count(*) as n from acceptance").to_pylist()[0]["n"]
    assert f" {count} " in err
    assert "Parser Error" in err
    assert " 42 " in err
    assert " 99 " not in err


def test_the_steps_of_a_window_are_in_order(cfg):
    found = [(r["window"], r["step"], r["state"]) for r in ask(cfg, "windows")]
    assert found == [(1, "window", "promoted"), (1, "evaluate", "done")]


def test_a_window_has_its_predicted_gain_beside_the_served_one(cfg):
    [row] = ask(cfg, "gain_of_windows")
    gains = [row[f"predicted_{name}"] for name in ("low", "gain", "high")]
    assert gains == pytest.approx([0.1, 0.15, 0.2])
    assert (row["requests_before"], row["requests_after"]) == (96, 96)
    assert 0.05 < row["served_gain"] < 0.5  # a tenth more of every chance
    assert row["why"] == "it paid"
