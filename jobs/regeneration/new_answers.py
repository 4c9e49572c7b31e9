"""Answers of the present target as logs in the format of the capture, which ingest reads.

Every file is written in one step and never changed, so a file that is there is whole. Its name
follows from the samples whose prompts were asked.
"""

import json
from contextlib import suppress
from typing import Any

import msgspec

from dflash.identity import target_id
from jobs.base.config import Config
from jobs.regeneration import answer_places
from jobs.regeneration.former_prompts import LOOP_TIMES, LOOP_TOKENS, LOOPS, Row, sampler_of
from serving.client import Completion
from store.ids import says_nothing, short_hash

KEPT = ("domain", "tenant", "language", "thinking", "consent")
"""What an answer takes over from the row of its prompt."""


def asked_already(cfg: Config) -> set[str]:
    """Samples whose prompts this target has answered anew, or will never answer."""
    found: set[str] = set()
    logs, aside = answer_places.answer_logs(cfg), answer_places.left_out(cfg)
    for log in logs.objects():
        for line in (logs.read(log.name) or b"").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # of a damaged line, it is asked again
                found.add(json.loads(line)["from_sample"])
    for file in aside.objects():
        with suppress(ValueError, TypeError):
            found.update(json.loads(aside.read(file.name) or b"{}"))
    return found


def keep(cfg: Config, answers: list[tuple[Row, Completion]], left_out: dict[str, str]) -> None:
    """Write one log of these answers, and a list of samples that were left out, with reasons."""
    if left_out:
        answer_places.left_out(cfg).write(
            f"{short_hash(sorted(left_out))}.json", json.dumps(left_out).encode()
        )
    if answers:
        lines = [msgspec.json.encode(record(cfg, row, answer)) + b"\n" for row, answer in answers]
        name = short_hash(sorted(row["sample_id"] for row, _ in answers))
        answer_places.answer_logs(cfg).write(f"{name}.jsonl", b"".join(lines))


def record(cfg: Config, row: Row, answer: Completion) -> dict[str, Any]:
    """One record. It keeps the time of the prompt: the newest prompts are learned from first."""
    looped = answer.finish_reason == "repetition"
    label = row["conversation_id"]
    return {
        "v": 1,
        "target_id": target_id(cfg.target_path),
        "from_sample": row["sample_id"],
        "ids_source": "regenerated",
        "request_id": answer.request_id,
        "captured_at": row["captured_at"],
        "conversation_id": None if says_nothing(label) else label,
        **{name: row[name] for name in KEPT},
        **sampler_of(cfg, row),
        "shaped": [],
        "prompt_ids": answer.prompt_ids,
        "output_ids": without_loop(answer.output_ids) if looped else answer.output_ids,
        "finish_reason": answer.finish_reason,
    }


def without_loop(ids: list[int]) -> list[int]:
    """An answer that ended in a loop, up to the end of the loop's first pass.

    A drafter predicts a loop without knowing anything, so learning from one teaches it nothing.
    """
    for size in range(1, LOOP_TOKENS + 1):
        end = len(ids)
        while end > size and ids[end - 1] == ids[end - 1 - size]:
            end -= 1
        if len(ids) - end >= (LOOP_TIMES - 1) * max(size, LOOPS["min_pattern_size"]):
            return ids[:end]
    return ids
