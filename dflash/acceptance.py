"""The one definition of acceptance: tau, tau_weighted, tau_macro, acceptance by position, the cut
at the end.

The first output token comes from prefill and belongs to no round. A round starts at an output token
a, its anchor, and drafts the tokens after it. The target keeps `accepted` of the drafts and adds
one token of its own, so a moves on by accepted + 1. Hence, for one request,
`sum(accepted + 1) == output tokens - 1`. Tau pools this over requests: it is a ratio of sums.
"""

from collections.abc import Mapping, Sequence

Accepted = Sequence[Sequence[int]]
"""For each request the number of accepted drafts of each round, 0..K."""


def cut_at_end(accepted: Sequence[int], num_output: int) -> list[int]:
    """Accepted counts of one request, cut so that they emit num_output - 1 tokens.

    vLLM also counts drafts that matched after the end of text or after the length limit, although
    they were never emitted. Example: rounds [3, 5] of an answer of 7 tokens emit 4 + 2, so [3, 1].
    Raises ValueError if the rounds cannot have made that many tokens.
    """
    left, cut = num_output - 1, []
    for count in accepted:
        if left <= 0:
            break
        cut.append(min(int(count), left - 1))
        left -= cut[-1] + 1
    if left > 0:
        raise ValueError(
            f"rounds {list(accepted)} emit {num_output - 1 - left} tokens after the first, "
            f"but the answer has {num_output}: these counts belong to another answer"
        )
    return cut


def traffic_rounds(
    accepted: Sequence[int], drafted: Sequence[int], num_output: int
) -> tuple[list[int], list[int]]:
    """(accepted, drafted) per round of an answer in production, cut at its end.

    vLLM counts no step without a draft to verify. There are some where K is 0 for large batches,
    after a preemption, and at the end of the context. They are appended as rounds that drafted
    nothing, although they may have come earlier. If such an answer ends within accepted drafts, the
    surplus cannot be told apart and stays: at most K drafts of one request.

    Steps [3, 5] of [7, 7] drafts: for 7 tokens [3, 1], [7, 7]; for 12 [3, 5, 0], [7, 7, 0].
    """
    missing = [0] * (num_output - 1 - sum(accepted) - len(accepted))
    cut = cut_at_end([*accepted, *missing], num_output)
    return cut, [*drafted, *missing][: len(cut)]


def num_rounds(accepted: Accepted) -> int:
    """Rounds over all requests."""
    return sum(len(rounds) for rounds in accepted)


def tau(accepted: Accepted) -> float:
    """Acceptance length: tokens per round, pooled. [[2, 0], [1]] -> 6 tokens / 3 rounds = 2.0.

    Raises ValueError without rounds: an empty set has no tau.
    """
    rounds = num_rounds(accepted)
    return tau_of_counts(sum(sum(request) for request in accepted) + rounds, rounds)


def tau_of_counts(tokens: int, rounds: int) -> float:
    """Tau from sums. tokens: output tokens without the first of each answer. rounds: all rounds,
    with drafts or without. 6 tokens in 3 rounds -> 2.0. Raises ValueError without rounds.
    """
    if rounds == 0:
        raise ValueError("no rounds: every answer is a single token or there are no requests")
    return (tokens - rounds) / rounds + 1


def tau_weighted(accepted: Accepted, counts: Sequence[int]) -> float:
    """Tau with each request counted as often as traffic has it: what a fleet serves.

    counts: how often each request was seen. [[2, 0], [1]] with counts [1, 3]: rounds 2 + 3, tokens
    4 + 6, so 2.0. Raises ValueError without rounds.
    """
    rounds = sum(n * len(request) for n, request in zip(counts, accepted, strict=True))
    tokens = sum(n * sum(request) for n, request in zip(counts, accepted, strict=True)) + rounds
    return tau_of_counts(tokens, rounds)


def tau_macro(accepted: Accepted) -> float:
    """Mean of per-request tau over requests with rounds. [[2, 0], [1]] -> (2 + 2) / 2 = 2.0.

    Raises ValueError without rounds.
    """
    each = [tau([request]) for request in accepted if request]
    if not each:
        raise ValueError("no rounds: every answer is a single token or there are no requests")
    return sum(each) / len(each)


def positions(accepted: Accepted, num_drafts: int) -> list[float]:
    """Share of all rounds in which draft k = 1..K was accepted (the joint rate, as vLLM counts).

    [[2, 0], [1]], K=2 -> [2/3, 1/3]. The sum plus 1 is tau. Raises ValueError without rounds.
    """
    counts = [count for request in accepted for count in request]
    if not counts:
        raise ValueError("no rounds: every answer is a single token or there are no requests")
    return [sum(c >= k for c in counts) / len(counts) for k in range(1, num_drafts + 1)]


def geometric_tau(alpha: float, num_drafts: int) -> float:
    """Tau if a draft at any position were accepted with probability alpha: the classic model
    (1 - alpha^(K+1)) / (1 - alpha) of arXiv 2211.17192. alpha 0.5, K 2 -> 1.75.
    """
    return sum(alpha**k for k in range(num_drafts + 1))


def fit_alpha(tau_by_k: Mapping[int, float]) -> float:
    """The alpha in 0..1, to four digits, that fits the measured tau(K) best in least squares.

    Raises ValueError without a measurement.
    """
    if not tau_by_k:
        raise ValueError("no tau(K) to fit alpha to")

    def misfit(step: int) -> float:
        return sum((geometric_tau(step / 1e4, k) - tau) ** 2 for k, tau in tau_by_k.items())

    return min(range(10_001), key=misfit) / 1e4
