"""Expected rounds of recorded answers: exact on an enumerable world, and against decoding."""

import functools
import itertools
import math

import pytest
import torch

from bench.sampled_rounds import anchor_chances, chances, expected, expected_tau
from dflash.acceptance import tau
from dflash.decode import decode
from dflash.replay import Request, replay
from dflash.sampling import GREEDY, Sampling

V, K, LONGEST, END = 3, 3, 6, 2
"""A world of three tokens, one of which ends the text; answers of up to six tokens; K = 3."""


@functools.cache
def p_of(text):
    """The target's distribution after a text."""
    draw = torch.Generator().manual_seed(hash(text) % 2**31)
    return torch.randn(V, generator=draw, dtype=torch.float64).softmax(0)


@functools.cache
def q_of(text, probabilistic):
    """The drafter's distributions [K, V] after a text. They do not depend on its own drafts."""
    draw = torch.Generator().manual_seed(hash(text) % 2**31 + 1)
    q = torch.randn(K, V, generator=draw, dtype=torch.float64).mul(2).softmax(1)
    return q if probabilistic else torch.eye(V, dtype=torch.float64)[q.argmax(1)]


def ended(text):
    return len(text) >= LONGEST or (len(text) > 0 and text[-1] == END)


def texts(text=()):
    """Every answer with its probability."""
    if ended(text):
        return [(text, 1.0)]
    found = []
    for token in range(V):
        rest = texts((*text, token))
        found += [(whole, float(p_of(text)[token]) * chance) for whole, chance in rest]
    return found


def served(anchor, probabilistic):
    """(expected rounds, expected accepted) from an anchor on, by enumerating rejection sampling."""
    if ended(anchor):
        return 0.0, 0.0
    q = q_of(anchor, probabilistic)
    rounds, accepted = 1.0, 0.0

    def go_on(text, chance, count):
        """Add what follows a round that emitted `count` drafts and one token."""
        nonlocal rounds, accepted
        more = served(text, probabilistic)
        rounds += chance * more[0]
        accepted += chance * (count + more[1])

    def step(text, k, chance):
        p = p_of(text)
        if k == K:
            for token in range(V):
                go_on((*text, token), chance * float(p[token]), K)
            return
        for token in range(V):
            kept = chance * float(torch.minimum(p, q[k])[token])
            whole = (*text, token)
            if ended(whole):  # the last token is emitted, but not counted as accepted
                go_on(whole, kept, k)
            else:
                step(whole, k + 1, kept)
            go_on(whole, chance * float((p - q[k]).clamp(min=0)[token]), k)

    step(anchor, 0, 1.0)
    return rounds, accepted


def recorded_chances(text, probabilistic):
    """(given_text, by_rule), each [A, K], of one answer of the little world."""
    count = len(text) - 1
    given, rule = torch.zeros(2, count, K, dtype=torch.float64)
    for a, k in itertools.product(range(count), range(K)):
        if a + k + 2 <= count:
            p, q = p_of(text[: a + k + 1]), q_of(text[: a + 1], probabilistic)[k]
            given[a, k] = (q / p).clamp(max=1)[text[a + k + 1]]
            rule[a, k] = torch.minimum(p, q).sum()
    return given, rule


@pytest.mark.parametrize("probabilistic", [False, True])
def test_rounds_expected_from_the_text_are_the_rounds_served_exactly(probabilistic):
    """Nothing is sampled: the mean over all answers equals the enumerated speculative decoding."""
    first = [(token, float(p_of(())[token])) for token in range(V)]
    parts = [(chance, *served((token,), probabilistic)) for token, chance in first]
    true_rounds = sum(chance * rounds for chance, rounds, _ in parts)
    true_accepted = sum(chance * accepted for chance, _, accepted in parts)
    rounds, accepted, tokens, naive = 0.0, 0.0, 0.0, 0.0
    for text, chance in texts():
        given, rule = recorded_chances(text, probabilistic)
        anchors = anchor_chances(given)
        found = expected(given, anchors)
        rounds += chance * found.rounds
        accepted += chance * float(found.accepted.sum())
        naive += chance * float(expected(rule, anchors).accepted.sum())
        tokens += chance * (len(text) - 1)
    assert math.isclose(rounds, true_rounds, rel_tol=1e-12)
    assert math.isclose(accepted, true_accepted, rel_tol=1e-12)
    assert math.isclose(rounds + accepted, tokens, rel_tol=1e-12)
    assert not math.isclose(naive, true_accepted, rel_tol=0.01), "the rule's bias is real"


def test_anchor_chances_by_hand():
    assert anchor_chances(torch.tensor([[0.5], [0.5], [0.0]])).tolist() == [1.0, 0.5, 0.75]
    with pytest.raises(ValueError, match="no rounds"):
        expected_tau([])


def recorded(target, drafter, sample, sampling, seed, **how):
    """A sampled answer with the rounds it was decoded in, its request and last hidden states."""
    prompt = sample.ids[~sample.loss_mask].tolist()
    real = decode(target, prompt, 20, (), drafter, 5, sampling, seed=seed, **how)
    ids = [*prompt, *real.output_ids]
    found = target.features([ids], drafter.cfg.target_layer_ids)[0]
    return real, Request(torch.tensor(ids), len(prompt), found.taps), found.last


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=20)])
def test_greedy_drafts_have_certain_rounds_and_they_are_the_replayed_ones(
    target, trained, samples, sampling
):
    for seed, sample in enumerate(samples[:4]):
        _, request, last = recorded(target, trained, sample, sampling, seed)
        found = chances(trained, target.embedding, target.head, request, last, sampling, 5, False)
        assert set(found.given_text.flatten().tolist()) <= {0.0, 1.0}
        walk = replay(trained, target.embedding, target.head, [request], 5)
        anchors = anchor_chances(found.given_text)
        assert float(anchors.sum()) == len(walk[0])
        assert expected_tau([expected(found.given_text, anchors)]) == pytest.approx(tau(walk))


def test_probabilistic_drafts_are_accepted_as_often_as_the_text_says(target, trained, samples):
    """Real rounds minus expected rounds of the same answers: mean 0. The bound of 5 standard errors
    fails a right estimator once in a million seeds.
    """
    hot, differences = Sampling(temperature=0.8), []
    for seed, sample in enumerate(samples * 3):
        real, request, last = recorded(target, trained, sample, hot, seed, probabilistic=True)
        found = chances(trained, target.embedding, target.head, request, last, hot, 5, True)
        rounds = float(anchor_chances(found.given_text).sum())
        assert 1 <= rounds <= 19
        differences.append(len(real.accepted) - rounds)
    spread = torch.tensor(differences)
    assert abs(float(spread.mean())) < 5 * float(spread.std()) / len(differences) ** 0.5
    assert float(spread.std()) > 0.1, "the coins must matter for this to be a test"
