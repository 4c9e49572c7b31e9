"""Which tokens vLLM drafted: what serving.worker recorded, split into the rounds of an answer."""

import json
from collections import defaultdict
from pathlib import Path

from serving.client import Completion
from serving.vllm_counts import rounds

Recorded = dict[str, list[list[int]]]
"""vLLM's internal request id -> the drafts of each of its steps."""


def read_drafts(path: Path) -> Recorded:
    """The file that a server with `drafts=path` has written."""
    found: Recorded = defaultdict(list)
    for line in path.read_text().splitlines():
        name, tokens = json.loads(line)
        found[name].append(tokens)
    return dict(found)


def drafted(answer: Completion, recorded: Recorded) -> list[list[int]]:
    """The drafts of each round of `answer`, as many rounds as serving.vllm_counts.rounds has.

    The last step of a request also drafts, for a round that never comes. Steps before its prompt is
    complete draft, too. So the rounds are the last steps before the final one.
    Raises ValueError if the server did not record this answer.
    """
    steps = next(
        (s for name, s in recorded.items() if name.startswith(f"{answer.request_id}-")), []
    )
    accepted, _ = rounds(answer)
    verified = len((answer.spec or {}).get("per_step_accepted") or [])
    if len(steps) <= verified:
        raise ValueError(
            f"answer {answer.request_id}: {len(steps)} steps were recorded for {verified} rounds; "
            "start the server with `drafts`"
        )
    return steps[-verified - 1 : -1][: len(accepted)]
