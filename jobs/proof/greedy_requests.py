"""The held-out prompts as requests for the target's plain greedy answer."""

from jobs.base.config import Config
from jobs.base.console import console, some_names
from jobs.dataset.slices import Row
from serving.client import Request

PLAIN = {"repetition_penalty": 1.0, "min_p": 0.0}
"""Set in every request: a target's generation_config.json may make a penalty the default."""


def as_request(row: Row) -> Request:
    """The recorded prompt as token ids, with room for the recorded answer, asked for greedily.

    The answer is the target's plain choice, even if the recorded one was sampled or shaped. Labels
    such as the domain are not sent: nothing captures these requests, and not every label can be an
    HTTP header.
    """
    return Request(
        prompt=list(row["prompt_ids"]), max_tokens=len(row["output_ids"]), extra=dict(PLAIN)
    )


def longest(cfg: Config, k: int) -> int:
    """The most tokens of prompt and answer with which vLLM drafts `k` tokens in every round.

    A request within K + 1 tokens of serve.max_model_len makes vLLM draft zeros for its whole batch.
    A round may begin another K + 1 tokens earlier.
    """
    return cfg.serve.max_model_len - 2 * (k + 1)


def servable(cfg: Config, rows: list[Row], k: int) -> list[Row]:
    """The rows that can be served with `k` drafts per round; a message lists those that are too
    long.

    The server refuses a request that may outgrow serve.max_model_len. One that comes close stops
    drafting for its whole batch. Raises ValueError if all rows are too long.
    """
    limit = longest(cfg, k)
    sizes = {row["sample_id"]: len(row["prompt_ids"]) + len(row["output_ids"]) for row in rows}
    left_out = sorted(name for name, size in sizes.items() if size > limit)
    if not left_out:
        return rows
    what = (
        f"{len(left_out)} of {len(rows)} held-out samples have more than {limit} tokens "
        f"(serve.max_model_len {cfg.serve.max_model_len}, less two rounds of K = {k})"
    )
    if len(left_out) == len(rows):
        raise ValueError(f"{what}: raise serve.max_model_len, up to {max(sizes.values())} and more")
    console.print(f"left out: {what}: {some_names(left_out)}", markup=False)
    return [row for row in rows if sizes[row["sample_id"]] <= limit]
