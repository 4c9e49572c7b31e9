"""Served against replayed: what passes in both dtypes, and what must not, without an engine."""

from dataclasses import replace

import pytest
import torch

from dflash.decode import decode
from dflash.drafter_config import DrafterConfig
from dflash.hypotheses import hypotheses
from dflash.model import Drafter, drafter_of
from dflash.replay import Request
from dflash.sampling import GREEDY, Sampling
from dflash.target_model import load_target
from dflash.training_step import generator
from jobs.proof.round_comparison import Comparison, Difference, compare, table
from serving.client import Completion
from tests.helpers.tiny import SHAPE, learn, make_target

K, LENGTH = 3, 40
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("comparison") / "target")


@pytest.fixture(scope="module")
def targets(folder):
    return {dtype: load_target(folder, dtype) for dtype in DTYPES}


@pytest.fixture(scope="module")
def prompts():
    return [
        torch.randint(6, 90, (5 + i,), generator=generator("comparison", i)).tolist()
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def known(targets, prompts):
    """A drafter that has memorised the greedy answers to these prompts."""
    target, found = targets[torch.float32], []
    config = DrafterConfig(
        **{name: SHAPE[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        block_size=K + 1,
        num_target_layers=6,
        target_layer_ids=(1, 3),
        mask_token_id=96,
    )
    for prompt in prompts:
        ids = [*prompt, *decode(target, prompt, LENGTH).output_ids]
        features = target.features([ids], config.target_layer_ids)[0].taps.clone()
        found.append(Request(torch.tensor(ids), len(prompt), features))
    return learn(config, target, found, steps=70)


def in_dtype(drafter: Drafter, dtype) -> Drafter:
    return drafter_of(drafter.cfg, {n: t.to(dtype) for n, t in drafter.state_dict().items()})


def served(target, drafter, prompts, length=LENGTH, sampling=GREEDY):
    """The answers and counts of an engine that computes with this drafter."""
    found = []
    for i, prompt in enumerate(prompts):
        real = decode(target, prompt, length, (), drafter, K, sampling, seed=i)
        found.append((f"s{i}", completion(prompt, real.output_ids, real.accepted)))
    return found


def completion(prompt, output, accepted, drafted=None):
    spec = {"per_step_accepted": accepted, "per_step_drafted": drafted or [K] * len(accepted)}
    return Completion(
        request_id="r",
        prompt_ids=prompt,
        output_ids=output,
        text="",
        finish_reason="stop",
        spec=spec | {"num_spec_steps": len(accepted)},
        top_logprobs=[],
        started=0.0,
        seconds=0.0,
        decode_seconds=None,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8)])
def test_a_right_drafter_passes_on_whatever_text_was_served(
    targets, known, prompts, dtype, sampling
):
    target, drafter = targets[dtype], in_dtype(known, dtype)
    found = compare(target, drafter, served(target, drafter, prompts, sampling=sampling), K)
    assert found.faults() == [], found.summary()
    assert not found.wrong
    assert found.rounds > 100
    accepted = sum(map(sum, found.served))
    assert accepted > (5 if sampling.temperature else 50), "nothing is accepted: a weak test"
    assert found.identical >= 0.8 * len(prompts)  # bfloat16: ties of tiny models; 12 of 12 here
    if dtype == torch.float32:
        assert found.identical == len(prompts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fault",
    [
        "rope_theta 100",
        "mask_token_id 5",
        "is_causal 1",
        "key norm",
        "position +1",
        "slots shifted",
    ],
)
def test_every_planted_fault_fails(targets, known, prompts, dtype, fault):
    target, drafter, prompts = targets[dtype], in_dtype(known, dtype), prompts[:6]
    [wrong] = [h for h in hypotheses(drafter.cfg, [100.0], [5]) if h.name == fault]
    found = compare(target, drafter, served(target, wrong.change(drafter), prompts), K)
    assert found.faults(), found.summary()
    assert found.beyond


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_rms_norm_eps_in_the_engine_fails(targets, known, prompts, dtype):
    """Once a champion's config.json was changed after replay: tau fell from 2.70 to 1.29."""
    target, drafter = targets[dtype], in_dtype(known, dtype)
    changed = drafter_of(replace(drafter.cfg, rms_norm_eps=1.0), drafter.state_dict())
    found = compare(target, drafter, served(target, changed, prompts), K)
    assert any("served tau" in fault for fault in found.faults()), found.summary()


def test_a_difference_late_in_an_answer_does_not_hide_behind_an_early_tie(targets, known, prompts):
    target, drafter = targets[torch.float32], known
    [(name, right)] = served(target, drafter, prompts[:1])
    counts = list(right.spec["per_step_accepted"])
    early = next(i for i, count in enumerate(counts) if count > 0)
    late = max(i for i, count in enumerate(counts[:-1]) if count > 0)
    for i in (late, early):  # the engine rejected what we accept
        counts[i : i + 1] = [counts[i] - 1, 0]
    answer = completion(right.prompt_ids, right.output_ids, counts)
    found = compare(target, drafter, [(name, answer)], K)
    assert {d.round for d in found.differences} >= {early, late + 1}
    assert len(found.beyond) >= 2


def test_rounds_without_room_prove_nothing(targets, known, prompts):
    """Answers shorter than a block: both sides are cut at the end, whatever the drafter does."""
    target = targets[torch.float32]
    short = compare(target, known, served(target, known, prompts, length=K), K)
    assert short.rounds > 0
    assert short.whole == 0
    assert "no served answer holds a whole block" in short.unchecked
    assert compare(target, known, served(target, known, prompts[:1]), K).whole > 5


def test_requests_that_were_drafted_less_are_left_out_by_name(targets, known, prompts):
    target = targets[torch.float32]
    (first, a), (second, b) = served(target, known, prompts[:2])
    assert a.spec is not None
    less = completion(a.prompt_ids, a.output_ids, a.spec["per_step_accepted"], [K - 1] * 40)
    assert less.spec is not None
    less.spec["per_step_drafted"] = [K - 1] * len(less.spec["per_step_accepted"])
    found = compare(target, known, [(first, less), (second, b)], K)
    assert (found.left_out, found.names) == ([first], [second])
    assert found.unchecked == ""
    assert f"drafted less than {K} tokens and left out: 1 answers ({first})" in found.words()
    found = compare(target, known, [(first, less)], K)
    assert found.unchecked == f"the engine drafted less than {K} tokens for 1 answers ({first})"
    one = completion(b.prompt_ids, b.output_ids[:1], [])
    assert (
        "no served answer has a second token"
        in compare(target, known, [(second, one)], K).unchecked
    )


def difference(gap, served=2, replayed=1):
    return Difference(
        request="s", round=0, anchor=9, served=served, replayed=replayed, gap=gap, bound=0.5
    )


def synthetic(served, replayed, gaps):
    return Comparison(
        k=K,
        names=[f"s{i}" for i in range(len(served))],
        served=served,
        replayed=replayed,
        lengths=[LENGTH] * len(served),
        differences=[difference(gap) for gap in gaps],
    )


def test_the_limits_are_one_percent_and_one_point_where_rounds_are_many():
    walk = [2, 1, 3, 0] * 250
    pooled, position = synthetic([walk], [walk], []).limits()
    assert (pooled, position) == (0.01, 0.01)
    assert synthetic([walk], [walk], []).faults() == []
    lower = [1, 1, 3, 0] * 250  # one draft in four rounds
    [tau, place] = synthetic([walk], [lower], []).faults()
    assert "served tau 2.500 is +11.1% off the replayed 2.250 (limit 1.0%)" in tau
    assert "draft 2 is accepted 25.0 points more often than replayed (limit 1.0)" in place


def test_with_few_rounds_single_near_ties_stay_within_the_limits():
    served, replayed = [[2, 1, 3, 0] * 5], [[2, 1, 3, 0] * 4 + [2, 0, 3, 0]]
    found = synthetic(served, replayed, [0.1])
    assert found.faults() == []
    assert found.limits()[1] == pytest.approx(3 / 20)


def test_a_request_in_twenty_may_differ_unless_all_are_near_ties():
    walks = [[2, 1, 3, 0] * 50 for _ in range(20)]
    other = [[2, 1, 3, 0] * 49 + [2, 1, 2, 0] for _ in range(20)]
    assert synthetic(walks, [*other[:2], *walks[2:]], [0.1, 0.4]).faults() == []
    assert synthetic(walks, [*other[:1], *walks[1:]], [9.0]).faults() == []
    assert synthetic(walks, [*other[:2], *walks[2:]], [0.9, 0.4]).faults() == [], "a tail of one"
    [fault] = synthetic(walks, [*other[:2], *walks[2:]], [1.6, 0.4]).faults()
    assert "only 18 of 20 requests have the replayed rounds (limit 95%), and 1 differing" in fault


def test_a_table_leaves_out_requests_without_a_round():
    rows = [{"domain": "a"}, {"domain": "b"}]
    assert table(rows, [[2, 0], []], K)["domains"] == {"a": 2.0}
