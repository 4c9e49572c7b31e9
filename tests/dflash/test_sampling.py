"""Rejection sampling has exactly the right distribution; top_k, top_p, temperature by hand."""

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chi2

from dflash.decode import decode
from dflash.replay import Request, replay
from dflash.sampling import GREEDY, Sampling, draft_probabilities, probabilities, verify

DRAWS = 8000
FALSE_ALARM = 1e-6
"""How often a correct sampler would fail each chi-square test with a fresh seed."""
P = torch.tensor([[0.6, 0.25, 0.1, 0.05], [0.1, 0.2, 0.3, 0.4], [0.3, 0.0, 0.5, 0.2]])
Q = torch.tensor([[0.2, 0.5, 0.1, 0.2], [0.4, 0.3, 0.2, 0.1]])
GREEDY_DRAFTS = [1, 3]


def law(p, q):
    """Probability of each emitted run: accepted drafts, then one token of the target.

    A draft is drawn and accepted with probability min(p, q). The round ends with token y with the
    rest of its probability, max(p - q, 0) at y.
    """
    found, last = {}, len(q)
    for count in range(last + 1):
        rest = p[last] if count == last else (p[count] - q[count]).clamp(min=0)
        for run in itertools.product(range(p.shape[1]), repeat=count + 1):
            chance = float(rest[run[-1]])
            for k, token in enumerate(run[:-1]):
                chance *= float(torch.minimum(p[k], q[k])[token])
            found[run] = found.get(run, 0.0) + chance
    return {run: chance for run, chance in found.items() if chance > 0}


def statistic(seen, expected):
    """Chi-square of counted runs against their probabilities; infinite for a run of chance 0."""
    total = sum(seen.values())
    assert abs(sum(expected.values()) - 1) < 1e-6
    if not set(seen) <= set(expected):
        return float("inf")
    return sum((seen[run] - total * e) ** 2 / (total * e) for run, e in expected.items())


def rounds(probabilistic, rule=verify):
    draw = torch.Generator().manual_seed(0)
    seen = Counter()
    for _ in range(DRAWS):
        drafts, q = GREEDY_DRAFTS, None
        if probabilistic:
            drafts, q = torch.multinomial(Q, 1, generator=draw).flatten().tolist(), Q
        count, last = rule(P, drafts, q, draw)
        seen[(*drafts[:count], last)] += 1
    return seen


@pytest.mark.parametrize("probabilistic", [False, True])
def test_a_round_has_the_law_of_rejection_sampling(probabilistic):
    q = Q if probabilistic else torch.eye(4)[GREEDY_DRAFTS]
    expected = law(P, q)
    limit = chi2.isf(FALSE_ALARM, len(expected) - 1)
    assert statistic(rounds(probabilistic), expected) < limit

    def recovers_from_p(p, drafts, q, draw):
        count, _ = verify(p, drafts, q, draw)
        return count, int(torch.multinomial(p[count], 1, generator=draw))

    assert statistic(rounds(probabilistic, recovers_from_p), expected) > limit, "no power"


@pytest.mark.parametrize("probabilistic", [False, True])
def test_the_law_keeps_the_targets_distribution(probabilistic):
    """Exactly: the first token of a round is distributed as p, whatever was drafted."""
    q = Q if probabilistic else torch.eye(4)[GREEDY_DRAFTS]
    first = torch.zeros(4)
    for run, chance in law(P, q).items():
        first[run[0]] += chance
    torch.testing.assert_close(first, P[0])


def test_settings_shape_the_distribution_as_vllm_says():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert probabilities(logits, GREEDY).tolist() == [[1.0, 0.0, 0.0, 0.0]]

    def found(**settings):
        return probabilities(logits, Sampling(temperature=1.0, **settings))[0].tolist()

    assert found(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    # The two likeliest sum to 0.7 and reach 0.65, so nothing behind them stays.
    assert found(top_p=0.65) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert found(top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert found(top_p=1e-6) == [1.0, 0.0, 0.0, 0.0]
    # top_k first: of [4/7, 3/7] the first alone reaches 0.5.
    assert found(top_k=2, top_p=0.5) == [1.0, 0.0, 0.0, 0.0]
    squared = [0.16, 0.09, 0.04, 0.01]
    cold = probabilities(logits, Sampling(temperature=0.5, top_k=-1))[0].tolist()
    assert cold == pytest.approx([x / sum(squared) for x in squared])
    ties = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    kept = probabilities(ties, Sampling(temperature=1.0, top_k=1))[0].tolist()
    assert kept == [0.0, 0.5, 0.5, 0.0]
    settings = Sampling(temperature=0.5, top_k=1, top_p=0.1)
    assert draft_probabilities(logits, settings)[0].tolist() == pytest.approx(cold)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}])
def test_settings_that_vllm_refuses_are_refused(wrong):
    with pytest.raises(ValueError, match="top_p in"):
        Sampling(**wrong)


def test_decoding_repeats_with_its_seed_and_stops_at_the_end(target, trained, samples):
    prompt = samples[0].ids[:5].tolist()
    hot = Sampling(temperature=1.0)
    first = decode(target, prompt, 16, (), trained, 3, hot, seed=5)
    assert decode(target, prompt, 16, (), trained, 3, hot, seed=5) == first
    assert decode(target, prompt, 16, (), trained, 3, hot, seed=6) != first
    end = first.output_ids[9]
    cut = decode(target, prompt, 16, (end,), trained, 3, hot, seed=5)
    assert cut.output_ids == first.output_ids[: first.output_ids.index(end) + 1]
    assert sum(count + 1 for count in cut.accepted) == len(cut.output_ids) - 1


def test_greedy_drafts_are_accepted_exactly_where_they_equal_the_sampled_text(
    target, trained, samples
):
    """With a one-hot q an emitted token is the draft if and only if the draft was accepted: replay
    of sampled text walks the very rounds that were served.
    """
    hot, k = Sampling(temperature=0.7, top_p=0.95), trained.cfg.num_drafts
    accepted = 0
    for seed, sample in enumerate(samples):
        prompt = sample.ids[~sample.loss_mask].tolist()
        real = decode(target, prompt, 20, (), trained, k, hot, seed=seed)
        ids = [*prompt, *real.output_ids]
        features = target.features([ids], trained.cfg.target_layer_ids)[0].taps
        known = Request(torch.tensor(ids), len(prompt), features)
        assert replay(trained, target.embedding, target.head, [known], k) == [real.accepted]
        accepted += sum(real.accepted)
    assert accepted > 0
