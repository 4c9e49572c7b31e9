"""flywheel select: budgets, caps, sides and versions, on rows written straight into traffic/."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from dflash.identity import target_id
from jobs import select
from jobs.base import cli
from jobs.base.config import Config, load
from jobs.dataset.samples import load_rows, selected
from jobs.ingestion.sample_counts import count_samples
from jobs.selection.sides import choose
from jobs.training import runs
from store.digests import Digests
from store.ids import sample_id, split_of
from store.schemas import ACCEPTANCE, LOGS, SELECTION, TRAFFIC
from tests.helpers.faulty_s3 import faulty
from tests.helpers.tables import regrouped
from tests.helpers.tiny import make_target

SIDES = ("train", "val", "test")
NEWEST = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def cfg(work_url, tmp_path, target) -> Config:
    scratch = tmp_path / "scratch"
    return load(
        None,
        [f"work={work_url}", f"scratch={scratch}", f"target.path={target}", "drafter.num_taps=3"],
    )


def row(cfg: Config, i: int, **more) -> dict:
    """A TRAFFIC row of ten tokens, captured i hours before NEWEST."""
    prompt, output = more.pop("prompt_ids", [i, 7, 8, 9, 10, 11]), [1, 2, 3, i]
    found: dict[str, Any] = dict.fromkeys(TRAFFIC.names) | {
        "conversation_id": f"c{i}",
        "split": split_of(f"c{i}", 10, 10),
        "domain": "a",
        "captured_at": NEWEST - timedelta(hours=i),
        "target_id": target_id(cfg.target_path),
        "prompt_ids": prompt,
        "output_ids": output,
        "loss_mask": [{"start": len(prompt), "end": len(prompt) + 4}],
        "temperature": 0.0,
        "repeat_count": 1,
        "request_id": f"r{i}",
        "prompt_tokens": len(prompt),
        "output_tokens": 4,
        "prompt_id": str(prompt),
    }
    found |= more
    found["sample_id"] = sample_id(found["target_id"], found["prompt_ids"], output)
    return found


def add(cfg: Config, rows: list[dict]) -> None:
    cfg.table("traffic").append(pa.Table.from_pylist(rows, schema=TRAFFIC))


def taken(cfg: Config, **settings) -> list[dict]:
    """The selected rows under these settings, newest first."""
    select.run(cfg.override("select", **settings))
    return sorted(selected(cfg).to_pylist(), key=lambda r: r["captured_at"], reverse=True)


def ages(rows: list[dict]) -> list[int]:
    return [round((NEWEST - r["captured_at"]).total_seconds() / 3600) for r in rows]


def test_small_traffic_is_taken_whole(cfg):
    add(cfg, [row(cfg, i) for i in range(30)])
    summary = select.run(cfg)
    assert (summary["samples"], summary["tokens"], summary["left_out"]) == (30, 300, {})
    assert summary["from_versions"] == {"traffic": 1, "acceptance": None, "logs": None}
    rows = load_rows(cfg, "train")
    assert rows[0]["output_ids"][:3] == [1, 2, 3]
    again = select.run(cfg)
    assert again["version"] == summary["version"], "the same traffic gives the same version"


def test_what_is_ingested_meanwhile_waits_for_the_next_selection(cfg, monkeypatch):
    add(cfg, [row(cfg, i) for i in range(5)])
    real = select.rank

    def late(cfg, identity, versions):
        add(cfg, [row(cfg, i) for i in range(5, 9)])
        return real(cfg, identity, versions)

    with monkeypatch.context() as patch:
        patch.setattr(select, "rank", late)
        summary = select.run(cfg)
    assert (summary["samples"], summary["from_versions"]["traffic"]) == (5, 1)
    assert select.run(cfg)["samples"] == 9


def test_the_newest_fill_the_budget_and_sides_keep_their_share(cfg):
    add(cfg, [row(cfg, i) for i in range(400)])
    rows = taken(cfg, domain_tokens=2000)
    assert 185 <= len(rows) <= 200
    held_out = [r for r in rows if r["split"] != "train"]
    assert 30 <= len(held_out) <= 40, "val and test have ten percent each"
    train = ages([r for r in rows if r["split"] == "train"])
    every = [i for i in range(400) if split_of(f"c{i}", 10, 10) == "train"]
    assert train == every[: len(train)], "the newest"
    counts = select.plan(cfg.override("select", domain_tokens=2000))["plan"]["a"]
    assert counts["budget"]["samples"] == 400 - len(rows)


def test_domains_share_what_is_there(cfg):
    add(cfg, [row(cfg, i, domain="big" if i % 10 else "small") for i in range(300)])
    plan = select.plan(cfg.override("select", tokens=1000))
    assert plan["budgets"] == {"small": 300, "big": 700}
    plan = select.plan(cfg.override("select", domains=["big=50", "*=100"]))
    assert plan["budgets"] == {"small": 100, "big": 50}
    assert select.plan(cfg.override("select", domains=["big=0"]))["budgets"]["big"] == 0


def test_caps(cfg):
    add(cfg, [row(cfg, i, prompt_ids=[5, 5, 5, 5, 5, 5]) for i in range(10)])
    assert ages(taken(cfg, per_prompt=3)) == [0, 1, 2]
    loud = [row(cfg, 100 + i, tenant="loud") for i in range(100)]
    add(cfg, [*loud, *(row(cfg, 300 + i, tenant="quiet") for i in range(10))])
    rows = taken(cfg, per_prompt=3, domain_tokens=500, tenant_share=0.5)
    shares = [r["tenant"] for r in rows]
    assert shares.count("quiet") >= 8, "the loud tenant leaves room"
    assert 15 <= shares.count("loud") <= 25


def test_a_sample_longer_than_the_budget_leaves_out_itself_only(cfg):
    add(cfg, [row(cfg, i) for i in range(10, 410)])
    before = {r["sample_id"] for r in taken(cfg, domain_tokens=2000)}
    long = [row(cfg, i, split=side, output_tokens=1700) for i, side in enumerate(SIDES)]
    add(cfg, long)
    rows = taken(cfg, domain_tokens=2000)
    assert {r["sample_id"] for r in rows} == before
    plan = select.plan(cfg.override("select", domain_tokens=2000))["plan"]["a"]
    assert plan["too_long"] == {"samples": 3, "tokens": 3 * 1706}


def test_a_sample_longer_than_its_tenants_share_leaves_out_itself_only(cfg):
    add(cfg, [row(cfg, i, tenant="xy"[i % 2], split="train") for i in range(10, 410)])
    add(cfg, [row(cfg, 0, tenant="x", output_tokens=1000, split="train")])
    add(cfg, [row(cfg, 1, domain="b", tenant="x", output_tokens=1000, split="train")])
    settings = {"domain_tokens": 2000, "tenant_share": 0.5}
    rows = taken(cfg, **settings)
    assert [r["tenant"] for r in rows if r["domain"] == "a"].count("x") == 80
    assert [r["domain"] for r in rows].count("b") == 1, "an only tenant has no share"
    plan = select.plan(cfg.override("select", **settings))["plan"]["a"]
    assert plan["too_long"] == {"samples": 1, "tokens": 1006}


def test_a_budget_of_nothing_calls_no_sample_long(cfg):
    add(cfg, [row(cfg, i) for i in range(9)])
    add(cfg, [row(cfg, i, domain="b", tenant="xy"[i % 2]) for i in range(10, 19)])
    plan = select.plan(cfg.override("select", domains=["a=0"], tenant_share=0.0))["plan"]
    assert (set(plan["a"]), set(plan["b"])) == ({"budget"}, {"tenant_share"})


def test_the_window(cfg):
    add(cfg, [row(cfg, i) for i in range(0, 100, 10)])
    add(cfg, [row(cfg, 40, captured_at=NEWEST - timedelta(days=9))])
    rows = taken(cfg, days=2)
    assert ages(rows) == [0, 10, 20, 30, 216], "the newest row counts, the earliest is written"
    found = select.plan(cfg.override("select", days=2))["plan"]["a"]
    assert found["too_old"] == {"samples": 5, "tokens": 50}


def test_samples_without_a_time_are_the_oldest(cfg):
    add(cfg, [*(row(cfg, i) for i in range(3)), row(cfg, 7, captured_at=None)])
    select.run(cfg)
    assert selected(cfg).num_rows == 4, "without a window they are taken"
    assert len(load_rows(cfg, "train") + load_rows(cfg, "val") + load_rows(cfg, "test")) == 4
    summary = select.run(cfg.override("select", days=2))
    assert (summary["samples"], summary["left_out"]) == (3, {"too_old": 1})


def ingested(cfg: Config, at: datetime, **more) -> None:
    """A LOGS row of this time."""
    log = dict.fromkeys(LOGS.names) | {"target_id": target_id(cfg.target_path), "ingested_at": at}
    cfg.table("logs").append(pa.Table.from_pylist([log | more], schema=LOGS))


def test_a_time_in_the_future_does_not_empty_the_window(cfg):
    add(cfg, [row(cfg, i) for i in range(0, 100, 10)])
    add(cfg, [row(cfg, 1000, captured_at=datetime(2099, 1, 1, tzinfo=UTC))])
    assert len(taken(cfg, days=2)) == 1, "without logs, nothing tells that it is wrong"
    ingested(cfg, NEWEST - timedelta(hours=23))
    ingested(cfg, datetime(2100, 1, 1, tzinfo=UTC), target_id="another")
    summary = select.run(cfg.override("select", days=2))
    assert ages(selected(cfg).to_pylist()).count(40) == 1
    assert (summary["samples"], summary["left_out"]) == (6, {"too_old": 5})
    assert summary["from_versions"]["logs"] == 2


def test_both_tails_of_served_acceptance_are_left_out(cfg):
    rows = [row(cfg, i, split="train") for i in range(4)] + [row(cfg, 4, split="test")]
    add(cfg, rows)
    accepted = {0: 7, 1: 0, 2: 3, 4: 7}
    acceptance = [
        dict.fromkeys(ACCEPTANCE.names)
        | {
            "sample_id": rows[i]["sample_id"],
            "target_id": rows[i]["target_id"],
            "origin": "served",
            "accepted": [count] * 20,
            "drafted": [7] * 20,
        }
        for i, count in accepted.items()
    ]
    cfg.table("acceptance").append(pa.Table.from_pylist(acceptance, schema=ACCEPTANCE))
    assert ages(taken(cfg)) == [2, 3, 4], "held-out samples stay as the traffic is"
    assert select.run(cfg)["left_out"] == {"garbled": 1, "looping": 1}


@pytest.mark.parametrize(("usual", "other"), [(0, 7), (7, 0)])
def test_a_domain_that_the_drafter_does_not_know_or_knows_by_heart_stays(cfg, usual, other):
    """New traffic was left out because the old drafter accepted nothing of it."""
    rows = [row(cfg, i, split="train", domain="new") for i in range(6)]
    add(cfg, rows)
    served = [
        dict.fromkeys(ACCEPTANCE.names)
        | {"sample_id": r["sample_id"], "target_id": r["target_id"], "domain": domain}
        | {"origin": "served", "drafter_version": "d", "log": "l"}
        | {"accepted": [accepted] * 20, "drafted": [7] * 20}
        for r, domain, accepted in [
            *((r, "new", usual) for r in rows),
            ({"sample_id": "x", "target_id": rows[0]["target_id"]}, "old", other),
        ]
    ]
    cfg.table("acceptance").append(pa.Table.from_pylist(served, schema=ACCEPTANCE))
    assert len(taken(cfg)) == 6


def test_repeats_are_merged_and_counted(cfg):
    add(cfg, [row(cfg, 1, domain="default"), row(cfg, 1, repeat_count=4)])
    add(cfg, [row(cfg, 1, captured_at=NEWEST - timedelta(hours=9))])
    [found] = taken(cfg)
    assert (found["repeat_count"], found["domain"]) == (6, "a")


POOLS: list[pa.MemoryPool] = []
"""Kept to the end: what Arrow allocated in a pool must not outlive it."""


def peak_of_arrow(cfg: Config, logs: int, rows: list[dict]) -> tuple[pa.Table, int]:
    """What is chosen of `logs` copies of these rows, and most bytes that Arrow held meanwhile."""
    for log in range(logs):
        later = timedelta(minutes=log)
        add(cfg, [r | {"log": str(log), "captured_at": r["captured_at"] + later} for r in rows])
    names, before = pa.array([r["sample_id"] for r in rows]), pa.default_memory_pool()
    POOLS.append(pa.proxy_memory_pool(before))
    pa.set_memory_pool(POOLS[-1])
    try:
        found, *_ = choose(cfg, rows[0]["target_id"], names, {names[0].as_py(): "train"}, None)
    finally:
        pa.set_memory_pool(before)
    return found, POOLS[-1].max_memory() or 0


def test_memory_follows_the_samples_not_the_logs_that_repeat_them(cfg):
    rows = [row(cfg, i, prompt_ids=[i, *range(20_000)]) for i in range(20)]
    rows += [row(cfg, 30 + i, prompt_ids=[i, *range(19_000)], conversation_id="") for i in range(5)]
    prompts = sum(4 * len(r["prompt_ids"]) for r in rows)
    _, few = peak_of_arrow(cfg, 1, rows)
    found, many = peak_of_arrow(cfg, 12, rows)
    assert few > prompts, "this measures what is read"
    assert many - few < prompts, "of eleven logs more, not even the prompts of one"
    whole = regrouped(cfg.table("traffic").read(), {rows[0]["sample_id"]: "train"})
    assert found.equals(whole.select(SELECTION.names))
    assert set(found["repeat_count"].to_pylist()) == {12}


def test_a_side_only_moves_towards_training(cfg):
    first, second = ([i, 1, 2, 3, 4] for i in (50, 51))
    add(cfg, [row(cfg, 1, prompt_ids=first, conversation_id="", split_by_prompt="test", split="")])
    assert [r["split"] for r in taken(cfg)] == ["test"]
    older = row(cfg, 5, prompt_ids=first[:4], split_by_prompt="train", split="", conversation_id="")
    add(
        cfg,
        [
            older,
            row(cfg, 2, prompt_ids=second, conversation_id="", split_by_prompt="val", split=""),
        ],
    )
    assert [r["split"] for r in taken(cfg)] == ["train", "val", "train"]
    select.run(cfg.override("select", days=0))
    add(
        cfg,
        [row(cfg, 9, prompt_ids=second[:4], conversation_id="", split_by_prompt="test", split="")],
    )
    assert [r["split"] for r in taken(cfg)] == ["train", "val", "train", "val"]


def test_without_traffic_it_says_what_to_run(cfg):
    with pytest.raises(
        ValueError, match=r"has no sample of target .*: run `flywheel ingest` first"
    ):
        select.run(cfg)
    with pytest.raises(ValueError, match="flywheel ingest"):
        selected(cfg)


def test_an_older_version_is_read_on_request(cfg):
    add(cfg, [row(cfg, 1)])
    old = select.run(cfg)["version"]
    add(cfg, [row(cfg, 2)])
    select.run(cfg)
    assert selected(cfg).num_rows == 2
    assert selected(cfg.override("select", version=old)).num_rows == 1


def test_a_pin_names_the_version_that_its_rows_are_of(cfg, monkeypatch):
    add(cfg, [row(cfg, i) for i in range(5)])
    version, before = select.run(cfg)["version"], selected(cfg)["sample_id"].to_pylist()
    real = runs.usable

    def late(cfg, rows):
        add(cfg, [row(cfg, i) for i in range(5, 9)])
        assert select.run(cfg)["version"] > version
        return real(cfg, rows)

    monkeypatch.setattr(runs, "usable", late)
    pin = runs.live_pin(cfg)
    assert pin.versions["selection"] == version
    assert set(pin.rows["sample_id"].to_pylist()) <= set(before)


def test_a_lost_shard_is_one_message(cfg, target, capsys):
    add(cfg, [row(cfg, 1)])
    [lost] = cfg.table("traffic").shards()
    cfg.place("traffic").delete([lost])
    settings = [f"work={cfg.work}", f"scratch={cfg.scratch}", f"target.path={target}"]
    assert cli.main(["select", *settings]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {cfg.work}: a query over the tables failed (")
    assert lost in error
    assert error.count("\n") == 1


def test_a_refused_shard_is_one_message(s3, tmp_path, target, monkeypatch, capsys):
    with faulty(s3) as proxy:
        for name, value in proxy.env.items():
            monkeypatch.setenv(name, value)
        settings = [f"work={proxy.url()}", f"scratch={tmp_path}", f"target.path={target}"]
        cfg = load(None, [*settings, "drafter.num_taps=3"])
        add(cfg, [row(cfg, 1)])
        proxy.fail("denied", methods=("GET", "HEAD"), under=".parquet")
        assert cli.main(["select", *settings]) == 2
        error = capsys.readouterr().err
        assert "the store refuses access: check the permissions" in error
        with pytest.raises(PermissionError, match="the store refuses access"):
            count_samples(cfg, target_id(target), Digests(cfg.place()))


def test_what_the_target_did_not_write_is_learned_from_but_never_judged_on(cfg):
    made = [row(cfg, i, ids_source="reencoded") for i in range(60)]
    both = [row(cfg, i, ids_source="served", log="b") for i in range(10)]
    add(cfg, made + both)
    summary = select.run(cfg)
    names = {r["sample_id"]: r["split"] for r in selected(cfg).to_pylist()}
    served = {r["sample_id"] for r in both}
    held_out = {r["sample_id"] for r in made if r["split"] != "train"}
    assert held_out - served
    assert names.keys() == {r["sample_id"] for r in made} - (held_out - served)
    assert summary["left_out"] == {"off_policy": len(held_out - served)}
