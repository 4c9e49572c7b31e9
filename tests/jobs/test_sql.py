"""SQL over real Parquet says what dflash.acceptance says."""

import json
import random
import time
from datetime import UTC, date, datetime

import pyarrow as pa
import pytest

from dflash import acceptance
from jobs.base import cli
from jobs.base.config import load
from jobs.base.stage_log import logged
from jobs.dataset import queries
from store import promotions
from store.schemas import ACCEPTANCE, SELECTION, TRAFFIC
from tests.helpers.tables import regrouped


@pytest.fixture
def cfg(tmp_path):
    return load(None, [f"work={tmp_path}"])


def rows(version, n, k=7, seed=0, **changes):
    """Requests with 0 to 20 rounds over two domains."""
    rng = random.Random(seed)
    for i in range(n):
        accepted = [rng.randint(0, k) for _ in range(rng.choice([0, 1, 5, 20]))]
        yield (
            dict.fromkeys(ACCEPTANCE.names)
            | {
                "request_id": f"r{i}",
                "sample_id": f"s{i}",
                "conversation_id": f"c{i}",
                "origin": "replay",
                "drafter_version": version,
                "target_id": "t",
                "domain": "ab"[i % 2],
                "k": k,
                "block_size": k + 1,
                "temperature": 0.0,
                "accepted": accepted,
                "drafted": [k] * len(accepted),
                "prompt_tokens": 5,
                "output_tokens": sum(accepted) + len(accepted) + 1,
            }
            | changes
        )


def publish(cfg, requests):
    rows = pa.Table.from_pylist(list(requests), schema=ACCEPTANCE)
    cfg.table("acceptance").append(rows)
    return rows.to_pylist()


def ask(cfg, question, **parameters):
    found = queries.Question.read(queries.find_question(question))
    return queries.ask_question(cfg, found, parameters).to_pylist()


def test_tau_equals_the_definition(cfg):
    data = publish(cfg, rows("d1", 300))
    found = {row["domain"]: row for row in ask(cfg, "tau_by_domain_and_version")}
    assert set(found) == {"a", "b", "(all)"}
    for domain, row in found.items():
        counts = [r["accepted"] for r in data if domain in ("(all)", r["domain"])]
        assert row["tau_tokens_per_round"] == pytest.approx(acceptance.tau(counts), rel=1e-12)
        assert row["tau_macro"] == pytest.approx(acceptance.tau_macro(counts), rel=1e-12)
        assert (row["requests"], row["rounds"]) == (len(counts), acceptance.num_rounds(counts))


def test_example_of_the_definition(cfg):
    base = next(rows("d1", 1))
    publish(cfg, [base | {"accepted": [2, 0]}, base | {"accepted": [1], "domain": "b"}])
    (row,) = [r for r in ask(cfg, "tau_by_domain_and_version") if r["domain"] == "(all)"]
    assert (row["tau_tokens_per_round"], row["tau_macro"]) == (2.0, 2.0)


def test_micro_and_macro_are_told_apart(cfg):
    """90 accepted drafts in 10 rounds, and 1 in 100 rounds: macro 5.5, micro 1.83."""
    base = next(rows("d1", 1))
    first, second = {"accepted": [9] * 10}, {"accepted": [1] + [0] * 99}
    publish(cfg, [base | first, base | second])
    row = ask(cfg, "tau_by_domain_and_version")[0]
    assert row["tau_tokens_per_round"] == pytest.approx(201 / 110)
    assert row["tau_macro"] == pytest.approx((10 + 1.01) / 2)


def test_positions_equal_the_definition(cfg):
    data = publish(cfg, rows("d1", 300))
    counts = [r["accepted"] for r in data]
    found = ask(cfg, "acceptance_by_position")
    assert [row["position"] for row in found] == list(range(1, 8))
    assert [row["accept_rate"] for row in found] == pytest.approx(acceptance.positions(counts, 7))
    assert found[0]["accept_rate"] == found[0]["accept_rate_given_previous"]
    assert sum(r["accept_rate"] for r in found) + 1 == pytest.approx(acceptance.tau(counts))


def test_octaves_of_prompt_length_share_the_requests_out(cfg):
    lengths = [1, 127, 128, 255, 256, 700]
    data = publish(
        cfg, ({**r, "prompt_tokens": n} for n, r in zip(lengths, rows("d1", 6), strict=True))
    )
    found = ask(cfg, "tau_by_prompt_length")
    spans = {(row["prompt_tokens_from"], row["prompt_tokens_below"]): row for row in found}
    assert [*spans] == [(1, 2), (64, 128), (128, 256), (256, 512), (512, 1024)]
    assert [row["requests"] for row in found] == [1, 1, 2, 1, 1]
    counts = [r["accepted"] for r in data if 128 <= r["prompt_tokens"] < 256]
    assert spans[128, 256]["tau_tokens_per_round"] == pytest.approx(acceptance.tau(counts))


def test_different_k_origins_and_temperatures_are_not_mixed(cfg):
    publish(cfg, rows("d1", 10))
    publish(cfg, rows("d1", 10, k=3))
    publish(cfg, rows("d1", 10, origin="served"))
    publish(cfg, rows("d1", 10, temperature=1.0))
    found = [r for r in ask(cfg, "tau_by_domain_and_version") if r["domain"] == "(all)"]
    assert [r["requests"] for r in found] == [10] * 4


def test_requests_without_rounds_have_no_tau(cfg):
    publish(cfg, [next(rows("d1", 1)) | {"accepted": []}])
    row = ask(cfg, "tau_by_domain_and_version")[0]
    assert (row["tau_tokens_per_round"], row["tau_macro"], row["rounds"]) == (None, None, 0)


def test_champion_against_challenger_is_paired(cfg):
    old = publish(cfg, rows("d1", 40))
    new = publish(cfg, rows("d2", 30, seed=1))
    publish(cfg, rows("d2", 40, k=3))  # another k: no pair
    decide(cfg, "refuse", "3", "d3")
    decide(cfg, "promote", "1", "d1")
    found = {row["domain"]: row for row in ask(cfg, "champion_vs_challenger")}
    assert set(found) == {"a", "b", "(all)"}
    row = found["(all)"]
    assert (row["challenger"], row["pairs"]) == ("d2", 30)
    assert row["champion_tau"] == pytest.approx(acceptance.tau([r["accepted"] for r in old[:30]]))
    assert row["challenger_tau"] == pytest.approx(acceptance.tau([r["accepted"] for r in new]))


def decide(cfg, action, version, drafter):
    record = {"action": action, "to_version": version, "to_drafter": drafter, "evidence": {"a": 1}}
    promotions.append(cfg.table("promotions"), record)


def test_without_a_champion_there_is_nothing_to_compare(cfg):
    publish(cfg, rows("d1", 4))
    assert ask(cfg, "champion_vs_challenger") == []


def test_own_question_with_the_views_and_macros(cfg, tmp_path, capsys):
    data = publish(cfg, rows("d1", 20))
    own = tmp_path / "mine.sql"
    own.write_text("select tau(accepted) as tau, max(started_at) as at, now() as n from acceptance")
    assert cli.main(["sql", str(own), f"work={cfg.work}"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["columns"] == ["tau", "at", "n"]
    assert summary["rows"][0][0] == pytest.approx(acceptance.tau([r["accepted"] for r in data]))


def test_wrong_questions_are_one_message(cfg, tmp_path, capsys):
    assert cli.main(["sql", "nonsense", f"work={cfg.work}"]) == 2
    assert "one of acceptance_by_position" in capsys.readouterr().err
    own = tmp_path / "mine.sql"
    own.write_text("selec 1")
    assert cli.main(["sql", str(own), f"work={cfg.work}"]) == 2
    assert "mine.sql: Parser Error" in capsys.readouterr().err
    own.write_text("-- nothing yet")
    assert cli.main(["sql", str(own), f"work={cfg.work}"]) == 2
    assert "mine.sql: no statement" in capsys.readouterr().err
    assert cli.main(["sql", "tau_by_dya", f"work={cfg.work}"]) == 2
    assert "did you mean tau_by_day" in capsys.readouterr().err


def test_a_work_folder_with_a_star_reads_its_own_rows_only(tmp_path):
    for name in ("a*", "ab"):
        publish(load(None, [f"work={tmp_path / name}"]), rows("d1", 10))
    found = ask(load(None, [f"work={tmp_path / 'a*'}"]), "tau_by_domain_and_version")
    assert {row["requests"] for row in found if row["domain"] == "(all)"} == {10}


def test_damaged_acceptance_file_is_named(cfg, capsys):
    publish(cfg, rows("d1", 20))
    [name] = cfg.table("acceptance").shards()
    path = cfg.path("acceptance", name)
    path.write_bytes(path.read_bytes()[:-5])
    assert cli.main(["sql", "acceptance_by_position", f"work={cfg.work}"]) == 2
    assert name in capsys.readouterr().err


def test_the_json_line_has_numbers_where_sql_has_numbers(cfg, tmp_path, capsys):
    own = tmp_path / "numbers.sql"
    own.write_text("select sum(n) as whole, 1.50::decimal(4, 2) as part from range(5) as t(n)")
    assert cli.main(["sql", str(own), f"work={cfg.work}"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [[10, 1.5]]


@pytest.fixture
def elsewhere(monkeypatch):
    """A machine in a time zone whose date is behind that of UTC for half of each day."""
    monkeypatch.setenv("TZ", "Pacific/Honolulu")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("elsewhere")
def test_days_are_utc_days_wherever_the_machine_is(cfg):
    publish(cfg, [next(rows("d1", 1)) | {"started_at": datetime(2026, 1, 2, 3, tzinfo=UTC)}])
    query = "select cast(date_trunc('day', started_at) as date) as day from acceptance"
    assert queries.ask(cfg, query).to_pylist() == [{"day": date(2026, 1, 2)}]


def test_the_traffic_view_merges_as_the_selection_does(cfg):
    """Once merged samples counted twice, and the columns language and shaped were missing."""
    base = dict.fromkeys(TRAFFIC.names) | {
        "target_id": "t",
        "repeat_count": 1,
        "output_ids": [5, 6],
        "shaped": "logit_bias",
    }
    found = [
        base
        | {"sample_id": "x", "conversation_id": "none", "prompt_ids": [1, 2, 3, 4], "domain": "b"},
        base
        | {"sample_id": "x", "conversation_id": "cx", "prompt_ids": [1, 2, 3, 4], "domain": "a"},
        base
        | {"sample_id": "y", "conversation_id": "cy", "prompt_ids": [9, 2, 3, 4], "domain": "a"},
    ]
    found[1] |= {"captured_at": datetime(2026, 1, 1, tzinfo=UTC), "language": "de"}
    found[2] |= {"tenant": "T", "split": "train"}
    for row in found:
        cfg.table("traffic").append(pa.Table.from_pylist([row], schema=TRAFFIC))
    names = ["sample_id", "conversation_id", "domain", "repeat_count", "language", "shaped"]
    query = f"select {', '.join(names)}, split, selected from Traffic order by sample_id"
    seen = queries.ask(cfg, query).to_pylist()
    wanted = regrouped(pa.Table.from_pylist(found, schema=TRAFFIC))
    assert seen == [
        r | {"split": None, "selected": False} for r in wanted.select(names).to_pylist()
    ]
    assert [row["repeat_count"] for row in seen] == [2, 1]
    chosen = pa.Table.from_pylist(
        [dict.fromkeys(SELECTION.names) | {"sample_id": "y", "target_id": "t", "split": "test"}],
        schema=SELECTION,
    )
    cfg.table("selection").append(chosen)
    seen = queries.ask(cfg, query).to_pylist()
    assert [(row["split"], row["selected"]) for row in seen] == [(None, False), ("test", True)]


def test_repeats_have_a_tau_of_their_own(cfg):
    base = next(rows("d1", 1))
    counts, accepted = [98, 1], [[0], [7, 7]]
    data = zip(counts, accepted, strict=True)
    publish(cfg, [base | {"accepted": a, "repeat_count": n} for n, a in data])
    row = ask(cfg, "tau_by_domain_and_version")[0]
    assert row["tau_tokens_per_round"] == pytest.approx(acceptance.tau(accepted))
    assert row["tau_weighted"] == pytest.approx(acceptance.tau_weighted(accepted, counts))


def test_what_was_run_can_be_asked_for(cfg):
    logged(cfg, "gc", lambda cfg: {"deleted": 3})
    query = "select stage, ok, (summary ->> 'deleted')::int as deleted from stages"
    assert queries.ask(cfg, query).to_pylist() == [{"stage": "gc", "ok": True, "deleted": 3}]


def test_questions_are_listed(cfg, capsys):
    assert cli.main(["sql", f"work={cfg.work}"]) == 0
    assert len(json.loads(capsys.readouterr().out)["questions"]) >= 3
