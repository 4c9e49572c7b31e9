"""Replayed, decoded and served rows of the same answers: one schema, one SQL, the same numbers."""

import operator
import shutil
from datetime import UTC, datetime

import pytest
import torch

from dflash.acceptance import num_rounds, positions, tau
from dflash.checkpoint import drafter_sha256, load_drafter
from dflash.identity import target_id
from dflash.replay import replay
from dflash.target_model import load_borrowed
from jobs.base import devices
from jobs.base.config import load
from jobs.dataset import acceptance_rows, queries
from jobs.dataset.samples import load_requests
from jobs.proof import reference_check
from jobs.proof.reference_check import check_reference
from serving.client import Completion
from serving.vllm_counts import served_row
from store.ids import drafter_version, short_hash
from tests.helpers.work import RIVAL_SETTINGS

K = 4


@pytest.fixture(scope="module")
def cfg(tmp_path_factory, rivals):
    """Greedy answers replayed, decoded by the reference decoder, and counted as vLLM counts."""
    work = shutil.copytree(rivals, tmp_path_factory.mktemp("reference") / "work")
    cfg = load(None, [f"work={work}", *RIVAL_SETTINGS, "verify.reference_requests=16"])
    folder = work / "drafters" / "known"
    found = zip(*load_requests(cfg, "test"), strict=True)
    whole = [
        (row, asked) for row, asked in found if not {0, 1} & set(row["output_ids"])
    ]  # end-of-text ids
    rows, requests = [row for row, _ in whole], [asked for _, asked in whole]
    drafter = load_drafter(folder)
    walks = replay(drafter, *load_borrowed(cfg.target_path, torch.float32), requests, K)
    identity, version = target_id(cfg.target_path), drafter_version(drafter_sha256(folder))
    acceptance_rows.commit_walks(cfg, identity, folder, drafter, rows, {K: walks})
    checked = check_reference(cfg, folder, rows)
    assert checked["identical"] == checked["requests"] == len(rows) >= 6
    served = [
        served_row(
            answer(row, walk),
            sample_id=row["sample_id"],
            conversation_id=row["conversation_id"],
            domain=row["domain"],
            target_id=identity,
            drafter_version=version,
            block_size=drafter.cfg.block_size,
            temperature=0.0,
            replica="test",
        )
        for row, walk in zip(rows, walks, strict=True)
    ]
    acceptance_rows.commit_rows(cfg, served, {"origin": "served"})
    return cfg


def test_a_target_too_large_for_float32_is_skipped_by_name(cfg, monkeypatch):
    monkeypatch.setattr(devices, "free_bytes", lambda: 1000)
    monkeypatch.setattr(reference_check, "load_target", lambda *args: pytest.fail("loaded"))
    rows = load_requests(cfg, "test")[0]
    found = check_reference(cfg, cfg.path("drafters", "known"), rows)
    assert found["requests"] == found["identical"] == 0
    assert "in float32, 0.0 GiB are free on the CPU" in found["skipped"]


def test_no_reference_requests_are_legal(cfg, monkeypatch):
    none = cfg.override("verify", reference_requests=0)
    monkeypatch.setattr(reference_check, "load_target", lambda *args: pytest.fail("loaded"))
    found = check_reference(none, cfg.path("drafters", "known"), load_requests(cfg, "test")[0])
    assert (found["requests"], found["skipped"]) == (0, "verify.reference_requests is 0")


def answer(row, walk):
    """Such an answer with vLLM's counts: the last round is counted beyond the end of the text."""
    counts = [*walk[:-1], K]
    spec = {
        "num_spec_tokens": K,
        "num_spec_steps": len(counts),
        "per_step_accepted": counts,
        "per_step_drafted": [K] * len(counts),
    }
    return Completion(
        request_id=row["sample_id"],
        prompt_ids=row["prompt_ids"],
        output_ids=row["output_ids"],
        text="",
        finish_reason="length",
        spec=spec,
        top_logprobs=[],
        started=0.0,
        seconds=1.0,
        decode_seconds=1.0,
    )


def test_every_question_gives_the_same_for_each_origin(cfg):
    rows = cfg.table("acceptance").read().to_pylist()
    assert {r["origin"] for r in rows} == {"replay", "decode", "served"}
    for question in ("tau_by_domain_and_version", "acceptance_by_position", "where_rounds_end"):
        found = queries.ask(cfg, queries.find_question(question).read_text(), question).to_pylist()
        by_origin = {
            origin: [r | {"origin": ""} for r in found if r["origin"] == origin]
            for origin in ("replay", "decode", "served")
        }
        assert by_origin["replay"] == by_origin["decode"] == by_origin["served"] != []


def test_rounds_end_where_the_definition_says(cfg):
    rows = cfg.table("acceptance").read().to_pylist()
    walks = [r["accepted"] for r in rows if r["origin"] == "decode"]
    query = queries.find_question("where_rounds_end").read_text()
    found = [r for r in queries.ask(cfg, query).to_pylist() if r["origin"] == "decode"]
    assert sum(r["rounds"] for r in found) == num_rounds(walks)
    assert sum(r["share_of_rounds"] for r in found) == pytest.approx(1)
    ends = {(r["ending"], r["draft"]): r["rounds"] for r in found}
    before = [count for walk in walks for count in walk[:-1]]
    for k in range(1, K + 1):
        assert ends.get(("rejected", k), 0) == before.count(k - 1)
    last = [walk[-1] for walk in walks]
    assert ends.get(("answer ended", None), 0) == sum(count < K for count in last)
    assert ends["all accepted", None] == before.count(K) + last.count(K)
    assert tau(walks) == pytest.approx(1 + sum(positions(walks, K)))


def test_rows_replace_older_ones_also_on_the_way_back(work_url, cfg):
    rows = cfg.table("acceptance").read().to_pylist()[:4]
    other, inputs = load(None, [f"work={work_url}"]), {"origin": "replay"}
    changed = [row | {"accepted": [0] * len(row["accepted"])} for row in rows]
    moved = [row | {"domain": "moved"} for row in rows]
    table, key = other.table("acceptance"), operator.itemgetter("request_id", "k", "origin")
    acceptance_rows.commit_rows(other, rows[:1], {"origin": "of others"})
    for found in (rows, changed, rows[:2], moved, rows):
        acceptance_rows.commit_rows(other, found, inputs)
        live = [row for row in table.read().to_pylist() if row["batch"] == short_hash(inputs)]
        plain = [row | {"batch": short_hash(inputs)} for row in found]
        assert sorted(live, key=key) == sorted(plain, key=key)
    version = table.version()
    later = [row | {"started_at": datetime.now(UTC)} for row in rows]
    acceptance_rows.commit_rows(other, later, inputs)
    assert table.version() == version, "the same walks at another time are no new data"
    assert table.read().num_rows == 5
