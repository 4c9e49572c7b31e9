"""A healthy work folder with rows in every table, as some days of production leave it."""

import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from dflash.acceptance import cut_at_end
from jobs.base.config import Config
from store.ids import drafter_version, prompt_id, sample_id
from store.schemas import TABLES
from tests.helpers.tables import add_rows

TARGET = "target0123456789"
OLD, NEW = "a" * 64, "b" * 64
"""Identities of two drafters: the champion before, and the champion."""
DAY = datetime(2026, 3, 1, tzinfo=UTC)
DAYS, KEY = 4, "features-0123456789abcdef"
CHANCES = {"chat": 0.6, "code": 0.75, "math": 0.4}
"""Chance that a draft is accepted, by domain; the new drafter has a tenth more."""

Row = dict[str, Any]


def rounds(rng: random.Random, chance: float, output_tokens: int, k: int) -> list[int]:
    """Accepted drafts per round of an answer."""
    accepted, made = [], 1
    while made < output_tokens:
        count = 0
        while count < k and rng.random() < chance:
            count += 1
        accepted.append(count)
        made += count + 1
    return cut_at_end(accepted, output_tokens)


def chance_of(sha256: str, domain: str) -> float:
    """The chance of acceptance of a drafter in a domain."""
    return CHANCES[domain] * (1.1 if sha256 == NEW else 1.0)


def fill(cfg: Config, per_hour: int = 2) -> Config:
    """Fill the tables: DAYS days of production with `per_hour` answers an hour, all of one log a
    day; the new drafter serves from the third day on.
    """
    rng = random.Random(0)
    samples = [_sample(rng, number) for number in range(DAYS * 24 * per_hour)]
    add_rows(cfg, "traffic", samples)
    add_rows(cfg, "logs", [_log(day, per_hour) for day in range(DAYS)])
    held_out = [s for s in samples if s["split"] == "test"]
    add_rows(cfg, "acceptance", [_answer(rng, sample) for sample in samples])
    for sha256 in (OLD, NEW):
        replayed = [_measured(rng, s, sha256, k, "replay") for s in held_out for k in (1, 3, 7)]
        add_rows(cfg, "acceptance", replayed)
    served = [_measured(rng, s, NEW, 7, "served") for s in held_out]
    add_rows(cfg, "acceptance", served)
    names = set(TABLES["selection"].names)
    add_rows(cfg, "selection", [{k: v for k, v in s.items() if k in names} for s in samples])
    add_rows(cfg, "feature_index", [_feature(s) for s in samples])
    add_rows(cfg, "rejects", [{"log": "log-0", "file": "day-0.jsonl", "offset": 7, "raw": b"{"}])
    add_rows(cfg, "promotions", _decisions())
    add_rows(cfg, "stages", _stages())
    add_rows(cfg, "windows", _windows())
    return cfg


def _windows() -> list[Row]:
    """The window that made the new drafter of the old one."""
    evaluated = {"drafter": drafter_version(NEW), "baseline": drafter_version(OLD)}
    evaluated |= {"baseline_tau": 2.0, "gain": 0.3, "gain_low": 0.2, "gain_high": 0.4}
    numbers = {"window": {"tokens": {"chat": 900}, "drifted": []}, "evaluate": evaluated}
    states = {"window": "promoted", "evaluate": "done"}
    return [
        {"window": 1, "place": i, "step": step, "state": state, "target_id": TARGET}
        | {"reason": "", "started_at": DAY, "seconds": 1.0, "numbers": json.dumps(numbers[step])}
        for i, (step, state) in enumerate(states.items())
    ]


def _sample(rng: random.Random, number: int) -> Row:
    prompt = [rng.randrange(1000) for _ in range(rng.choice([20, 200, 900]))]
    output = [rng.randrange(1000) for _ in range(rng.choice([40, 100, 160]))]
    conversation = number // 2
    return {
        "sample_id": sample_id(TARGET, prompt, output),
        "conversation_id": f"c{conversation}",
        "split": ("train", "train", "train", "val", "test")[conversation % 5],
        "domain": rng.choice([*CHANCES]),
        "source": "capture",
        "captured_at": DAY + timedelta(hours=number * 24 * DAYS / (DAYS * 24 * 2)),
        "target_id": TARGET,
        "prompt_ids": prompt,
        "output_ids": output,
        "loss_mask": [{"start": len(prompt), "end": len(prompt) + len(output)}],
        "ids_source": "served",
        "finish_reason": "stop",
        "temperature": 0.0,
        "consent": True,
        "repeat_count": 1,
        "request_id": f"r{number}",
        "shaped": "",
        "log": f"log-{number // 48}",
        "prompt_tokens": len(prompt),
        "output_tokens": len(output),
        "prompt_id": prompt_id(prompt),
    }


def _log(day: int, per_hour: int) -> Row:
    used = 24 * per_hour
    counts = {"records": used + 3, "accepted": used, "reject:not_json": 1, "unused:no_consent": 2}
    path = f"capture/day-{day}.jsonl"
    return {
        "log": f"log-{day}",
        "path": path,
        "target_id": TARGET,
        "bytes": used * 1500,
        "sha256": f"{day}" * 64,
        "rules": "{}",
        "reading": 1,
        "counts": json.dumps(counts | {"finish:stop": used}),
        "names": "{}",
        "examples": json.dumps({"not_json": f"{path}:7", "no_consent": f"{path}:99"}),
        "ingested_at": DAY + timedelta(days=day + 1),
    }


SAME = ("sample_id", "conversation_id", "target_id", "domain", "temperature", "prompt_tokens")


def _answer(rng: random.Random, sample: Row) -> Row:
    """The row of production of a sample; K falls with the load."""
    recent = sample["captured_at"] >= DAY + timedelta(days=2)
    sha256, k = (NEW if recent else OLD), rng.choice([7, 7, 3])
    chance = chance_of(sha256, sample["domain"])
    accepted = rounds(rng, chance, sample["output_tokens"], k)
    return {
        **{name: sample[name] for name in (*SAME, "output_tokens", "request_id", "log")},
        "origin": "served",
        "drafter_version": drafter_version(sha256),
        "version": "2" if recent else "1",
        "k": 7,
        "accepted": accepted,
        "drafted": [k] * len(accepted),
        "started_at": sample["captured_at"] - timedelta(seconds=2),
        "finished_at": sample["captured_at"],
        "replica": rng.choice(["east", "west"]),
        "concurrency": 1 if k == 7 else 12,
        "repeat_count": 1,
        "batch": sample["log"],
    }


def _measured(rng: random.Random, sample: Row, sha256: str, k: int, origin: str) -> Row:
    chance = chance_of(sha256, sample["domain"])
    accepted = rounds(rng, chance, sample["output_tokens"], k)
    return {
        **{name: sample[name] for name in (*SAME, "output_tokens", "repeat_count")},
        "request_id": f"{origin}-{sample['sample_id']}",
        "origin": origin,
        "drafter_version": drafter_version(sha256),
        "k": k,
        "block_size": 8,
        "accepted": accepted,
        "drafted": [k] * len(accepted),
        "started_at": DAY + timedelta(days=2),
        "finished_at": DAY + timedelta(days=2),
        "replica": "",
        "batch": f"{origin}-{sha256[:4]}",
    }


def _feature(sample: Row) -> Row:
    return {
        "features_key": KEY,
        "sample_id": sample["sample_id"],
        "n_tokens": sample["prompt_tokens"] + sample["output_tokens"],
        "file": f"{sample['log']}.parquet",
        "row_group": 0,
        "file_bytes": 90_000_000,
        "e_tag": "e",
        "harvested_at": DAY + timedelta(days=DAYS),
    }


def _decisions() -> list[Row]:
    judged = {
        "name": "chat",
        "conversations": [30, 90],
        "offered": [700, 2100],
        "accepted": [410, 1170],
        "difference": 0.04,
        "low": -0.01,
        "high": 0.09,
        "tolerance": 0.05,
        "answer": "advance",
    }
    others = judged | {"name": "(all others)", "difference": 0.02, "low": -0.03, "high": 0.06}
    tau = {"pooled": 2.31, "ci": [2.2, 2.42]}
    found: list[tuple[str, str | None, str, str, Any, str]] = [
        ("promote", None, "1", OLD, {"tau": tau, "baseline": None}, "gate passed"),
        (
            "promote",
            "1",
            "2",
            NEW,
            {
                "tau": tau,
                "baseline": {"delta": 0.21, "delta_ci": [0.1, 0.32]},
                "k_by_batch_size": [7, 3],
            },
            "gate passed",
        ),
        ("rollout-canary", "1", "2", NEW, {"replica": "http://east:8000"}, "east goes first"),
        (
            "rollout-advance",
            "1",
            "2",
            NEW,
            {
                "rollout": 3,
                "verdict": {"answer": "advance", "answers": [80, 240], "judged": [judged, others]},
            },
            "a loss beyond the tolerance is excluded",
        ),
    ]
    return [
        {
            "number": number,
            "decided_at": DAY + timedelta(days=2, minutes=number),
            "action": action,
            "who": "me@host",
            "model": "drafter",
            "from_version": before,
            "from_drafter": before and drafter_version(OLD),
            "to_version": version,
            "to_drafter": drafter_version(sha256),
            "reason": reason,
            "evidence": json.dumps(evidence),
            "lease": number,
        }
        for number, (action, before, version, sha256, evidence, reason) in enumerate(found, 1)
    ]


def _stages() -> list[Row]:
    speeds = [
        {
            "concurrency": n,
            "plain": [p, p + 1.0, p + 2.0],
            "drafted": [d, d + 2.0, d + 4.0],
            "ratio": r,
        }
        for n, p, d, r in ((1, 99.0, 198.0, 2.0), (8, 599.0, 798.0, 1.333))
    ]
    train = {"name": "drafter-0123", "samples": 96, "base": OLD}
    train["inputs"] = {"selection_version": 3, "features": KEY}
    baseline = {"delta": 0.21, "drafter_sha256": OLD}
    known = {"drafter": "drafter-0123", "drafter_sha256": NEW}
    predicted = {"1": {"1": 1.4, "3": 1.8, "7": 2.0}, "8": {"1": 1.1, "3": 1.3, "7": 0.9}}
    summaries: dict[str, Row] = {
        "train": train,
        "evaluate": known | {"tau": {"pooled": 2.31}, "baseline": baseline},
        "preflight": known | {"ok": True},
        "verify": known
        | {"speeds": speeds, "speedup": {"1": 2.0, "8": 1.333}}
        | {"predicted": predicted, "k_by_batch_size": [7, 7, 3]},
    }
    return [
        {
            "stage": stage,
            "started_at": DAY + timedelta(days=1, hours=i),
            "finished_at": DAY + timedelta(days=1, hours=i, minutes=30),
            "ok": True,
            "who": "me@host",
            "summary": json.dumps({"stage": stage} | summary),
        }
        for i, (stage, summary) in enumerate(summaries.items())
    ]
