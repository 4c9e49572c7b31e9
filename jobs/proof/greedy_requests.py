"""The held-out prompts as requests: the target's plain choice is asked for."""

from jobs.dataset.slices import Row
from serving.client import Request

PLAIN = {"repetition_penalty": 1.0, "min_p": 0.0}
"""Said in every request: a target's generation_config.json may make a penalty the default."""


def as_request(row: Row) -> Request:
    """The recorded prompt as token ids, with room for the recorded answer, asked for greedily.

    Whatever shaped or sampled the recorded answer, this one is the target's plain choice.
    Its labels stay here: nothing captures these requests, and not every text can be a header.
    """
    return Request(
        prompt=list(row["prompt_ids"]), max_tokens=len(row["output_ids"]), extra=dict(PLAIN)
    )
