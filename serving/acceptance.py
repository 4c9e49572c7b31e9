"""What served answers say about a drafter: accepted counts per round, as rows of acceptance/."""

from datetime import UTC, datetime, timedelta
from typing import Any

from dflash.acceptance import cut_at_end
from serving.client import Completion


def rounds(answer: Completion) -> tuple[list[int], list[int]]:
    """(accepted, drafted) per round of one answer, cut at its end like every tau of this project.

    vLLM counts drafts that matched beyond the end of text or the length limit; they were never
    emitted. Raises ValueError if the server did not draft or did not report per step.
    """
    steps = answer.spec or {}
    if "per_step_accepted" not in steps:
        raise ValueError(
            f"answer {answer.request_id} has no speculative metrics: serve with a drafter and "
            "--per-request-spec-decode-metrics detailed"
        )
    accepted = cut_at_end(steps["per_step_accepted"], len(answer.output_ids))
    return accepted, list(steps["per_step_drafted"][: len(accepted)])


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
