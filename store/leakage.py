"""Which prompts begin with which others: the one test of whether two samples share a text.

A chat sends all of its earlier turns again, so the prompt of a later turn begins with the prompt of
an earlier one. Equal prompts are the same text, whoever asks. What else the prompts of a domain
share (a system prompt, a template) is never a whole prompt, so it relates nothing.
"""

from itertools import pairwise

import pyarrow as pa

TOKEN = 4  # bytes of a token id
MIN_PREFIX = 4 * TOKEN
"""Bytes. A shorter prompt (a lone start-of-text token, say) is related only to an equal one."""


def leaking(train: pa.Table, held_out: pa.Table) -> set[str]:
    """sample_ids of held-out TRAFFIC rows whose text is in the training rows, too: the prompt is
    equal to one of a training row, continues it, or is continued by it.

    A million rows take seconds: one sort of the prompts.
    """
    learned, asked = token_bytes(train["prompt_ids"]), token_bytes(held_out["prompt_ids"])
    nodes, parents = forest(learned + asked)
    above = [False] * len(parents)
    for node in nodes[: len(learned)]:
        above[node] = True
    below = above.copy()
    for node, parent in enumerate(parents):  # parents come before children
        above[node] |= parent >= 0 and above[parent]
    for node in range(len(parents) - 1, -1, -1):
        if below[node] and parents[node] >= 0:
            below[parents[node]] = True
    names = held_out["sample_id"].to_pylist()
    mine = nodes[len(learned) :]
    return {name for name, node in zip(names, mine, strict=True) if above[node] or below[node]}


def token_bytes(column: pa.ChunkedArray) -> list[bytes]:
    """Each row's ids as bytes, so that a prefix of ids is a prefix of bytes. Null gives b""."""
    found = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy() * TOKEN
        data = chunk.values.to_numpy().astype("<i4", copy=False).tobytes()
        found += [data[a:b] for a, b in pairwise(offsets.tolist())]
    return found


def forest(prompts: list[bytes]) -> tuple[list[int], list[int]]:
    """(node of each prompt, parent of each node or -1): equal prompts share a node, and a node's
    parent is the longest other prompt that it begins with. Parents have smaller numbers.
    """
    distinct = sorted(set(prompts))
    parents, open_nodes = [], []
    for node, prompt in enumerate(distinct):
        while open_nodes and not prompt.startswith(distinct[open_nodes[-1]]):
            open_nodes.pop()
        parents.append(open_nodes[-1] if open_nodes else -1)
        if len(prompt) >= MIN_PREFIX:
            open_nodes.append(node)
    numbers = {prompt: node for node, prompt in enumerate(distinct)}
    return [numbers[prompt] for prompt in prompts], parents
