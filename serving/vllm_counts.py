"""What served answers say about a drafter: accepted counts per round, as rows of acceptance/."""

from datetime import UTC, datetime, timedelta
from typing import Any

from dflash.acceptance import cut_at_end
from serving.client import Completion, counter

DECODE_STEPS = "vllm:inter_token_latency_seconds_count"


def rounds(answer: Completion) -> tuple[list[int], list[int]]:
    """(accepted, drafted) per round of one answer, cut at its end like every tau of this project.

    vLLM also counts drafts that matched beyond the end of text or the length limit, although they
    were never emitted. It does not count the last step of an answer that fills max_model_len, where
    no draft has room: here it is a round that drafted nothing. An answer of one token has no round.
    Raises ValueError if the server reports nothing per step: it did not draft, or a stop string
    ended the answer (its metrics then never leave the engine).
    """
    steps = answer.spec or {"num_spec_steps": None}
    counts, drafted = steps.get("per_step_accepted"), steps.get("per_step_drafted")
    if counts is None and steps["num_spec_steps"] != 0:
        raise ValueError(
            f"answer {answer.request_id} has no speculative metrics: serve with a drafter and "
            "--per-request-spec-decode-metrics detailed, and end answers by tokens "
            "(stop_token_ids, max_tokens), not by stop strings"
        )
    counts, drafted = counts or [], drafted or []
    emitted = sum(counts) + len(counts) + 1
    if answer.finish_reason == "length" and len(answer.output_ids) == emitted + 1:
        counts, drafted = [*counts, 0], [*drafted, 0]
    accepted = cut_at_end(counts, len(answer.output_ids))
    return accepted, list(drafted[: len(accepted)])


def decode_steps(url: str) -> int:
    """Rounds of a server so far, over all requests, with any method of drafting or none.

    vLLM records one inter-token latency for each step of a request that emits tokens, except its
    first. Its per-request metrics count only steps that had a draft to verify. For methods that
    often draft nothing (n-gram and suffix lookup), they miss the rounds that gave one token.
    """
    return int(counter(url, DECODE_STEPS))


def served_row(
    answer: Completion,
    *,
    sample_id: str,
    conversation_id: str,
    domain: str,
    target_id: str,
    drafter_version: str,
    block_size: int,
    temperature: float,
    replica: str,
) -> dict[str, Any]:
    """One row of store.schemas.ACCEPTANCE with origin `served`."""
    accepted, drafted = rounds(answer)
    started = datetime.fromtimestamp(answer.started, UTC)
    return {
        "request_id": answer.request_id,
        "sample_id": sample_id,
        "conversation_id": conversation_id,
        "origin": "served",
        "drafter_version": drafter_version,
        "target_id": target_id,
        "domain": domain,
        "k": answer.spec["num_spec_tokens"] if answer.spec else 0,
        "block_size": block_size,
        "temperature": temperature,
        "accepted": accepted,
        "drafted": drafted,
        "prompt_tokens": len(answer.prompt_ids),
        "output_tokens": len(answer.output_ids),
        "started_at": started,
        "finished_at": started + timedelta(seconds=answer.seconds),
        "replica": replica,
    }


def pooled_by_vllm(answers: list[Completion]) -> float:
    """Tau as vLLM counts it: pooled, with drafts beyond the end of text included."""
    specs = [a.spec for a in answers if a.spec]
    steps = sum(s["num_spec_steps"] for s in specs)
    return 1 + sum(s["num_accepted_draft_tokens"] for s in specs) / steps
