"""Sampled traffic: the expected rounds of a server, computed from a recorded answer.

Let p be the distribution that the target samples from, and q the one that the draft is drawn from.
Rejection sampling emits a token x with probability p(x), and as an accepted draft with probability
min(p, q)(x). So a token x of the text was an accepted draft with probability min(1, q(x) / p(x)).
A recorded answer thus determines the distribution of its rounds, and nothing has to be sampled.
Greedy drafts have a one-hot q: the chance is 1 where draft and text agree and 0 elsewhere. Then
this is replay.

Shape suffixes: A anchors (output tokens 0 .. n-2), K drafts, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dflash.model import Drafter
from dflash.replay import Request, draft_hidden
from dflash.sampling import Sampling, draft_probabilities, probabilities

BLOCKS = 32
"""Anchors computed together: about BLOCKS * K rows of logits are in memory."""


@dataclass(frozen=True)
class Chances:
    """Acceptance chances [A, K] of draft k after each anchor; 0 where the end of the text cuts it.

    given_text: chance that the recorded token was an accepted draft, min(1, q(x) / p(x)).
    by_rule: chance that vLLM accepts the draft, without knowing the text: p(draft) for greedy
    drafts, sum(min(p, q)) = 1 - TV(p, q) for probabilistic ones. Its p is conditioned on the
    recorded tokens, so from the second draft on it is right only if the earlier drafts equal them.
    """

    given_text: Tensor
    by_rule: Tensor


@torch.inference_mode()
def chances(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    request: Request,
    last: Tensor,
    sampling: Sampling,
    num_drafts: int,
    probabilistic: bool,
) -> Chances:
    """Chances of one recorded answer.

    last [>= P + n - 1, H]: the target's last hidden states over prompt and answer. `sampling`: the
    settings the answer was sampled with. `probabilistic`: how drafts are chosen (dflash.decode).
    """
    start, count = request.num_prompt, request.num_output - 1
    tokens = request.ids[start:]
    context = drafter.context(request.features[None].to(embedding.dtype))
    given, rule = torch.zeros(count, num_drafts), torch.zeros(count, num_drafts)
    for first in range(0, count, BLOCKS):
        anchors = torch.arange(first, min(first + BLOCKS, count))
        hidden = draft_hidden(
            drafter, embedding, context, tokens[anchors][None], (start + anchors)[None], num_drafts
        )[0]
        ahead = last[start + first : start + min(first + BLOCKS + num_drafts, count)]
        p_next = probabilities(ahead.contiguous() @ head.T, sampling)  # of tokens first + 1 ..
        for k in range(num_drafts):
            # dflash.acceptance never counts a draft in the place of the last token.
            inside = anchors[anchors + k + 2 <= count]
            logits = drafter.logits(hidden[: len(inside), k].contiguous(), head)
            q = draft_probabilities(logits, sampling if probabilistic else Sampling())
            p, x = p_next[inside - first + k], tokens[inside + k + 1, None]
            given[inside, k] = _ratio(q.gather(1, x), p.gather(1, x))[:, 0]
            rule[inside, k] = torch.minimum(p, q).sum(1)
    return Chances(given, rule)


def anchor_chances(given_text_AK: Tensor) -> Tensor:
    """Probability [A] that each token is an anchor; the sum is the expected number of rounds.

    The first token is one. A round that accepts l drafts moves l + 1 tokens.
    Example: [[.5], [.5], [0.]] -> [1, .5, .75].
    """
    num_anchors, num_drafts = given_text_AK.shape
    reached = pad(pad(given_text_AK.double().cumprod(1), (1, 0), value=1.0), (0, 1))
    exactly = reached[:, :-1] - reached[:, 1:]  # [A, K + 1]: 0 .. K drafts accepted
    found = torch.zeros(num_anchors + num_drafts + 1, dtype=torch.float64)
    found[0] = 1.0
    for a in range(num_anchors):
        found[a + 1 : a + num_drafts + 2] += found[a] * exactly[a]
    return found[:num_anchors]


@dataclass(frozen=True)
class Expected:
    """Expected rounds of one answer, and expected rounds in which draft k was accepted [K]."""

    rounds: float
    accepted: Tensor


def expected(chances_AK: Tensor, anchors_A: Tensor) -> Expected:
    """Sums over anchors, each weighted with its probability. Draft k is accepted with the product
    of the chances of drafts 1 to k.
    """
    accepted = anchors_A[:, None] * chances_AK.double().cumprod(1)
    return Expected(float(anchors_A.sum()), accepted.sum(0))


def expected_tau(answers: Iterable[Expected]) -> float:
    """Pooled tau: 1 + accepted / rounds. Raises ValueError without rounds."""
    answers = list(answers)
    rounds = sum(answer.rounds for answer in answers)
    if rounds == 0:
        raise ValueError("no rounds: every answer is a single token or there are no requests")
    return 1 + sum(float(answer.accepted.sum()) for answer in answers) / rounds


def _ratio(q: Tensor, p: Tensor) -> Tensor:
    """min(1, q / p). Where rounding makes p 0: 1 if q can draw the token, else 0."""
    return torch.where(p > 0, (q / p).clamp(max=1), (q > 0).to(p.dtype))
