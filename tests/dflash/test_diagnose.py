"""Every fault of the table does what it says, is distinguished from all others, and is found."""

from dataclasses import replace

import pytest
import torch

from dflash import model
from dflash.checkpoint import load_drafter, save_drafter
from dflash.diagnose import (
    REPRODUCED,
    Agreement,
    Mismatch,
    Trace,
    compare,
    explain,
    fits_better,
    read_answer,
)
from dflash.hypotheses import AS_CONFIGURED, hypotheses
from dflash.model import block_embeds, new_drafter
from dflash.replay import replay
from tests.helpers.tiny import learn

PAIRS = ("llama-float32",)  # hypotheses are about the drafter
THETAS, MASKS, K = (1e4, 1e6), (96, 0, 95), 5
BOUND = 1e-3  # of the largest logit


@pytest.fixture(scope="module")
def answers(target, config, samples):
    found = []
    for sample in samples:
        ids, num_prompt = sample.ids.tolist(), int((~sample.loss_mask).sum())
        found.append(read_answer(target, config, ids[:num_prompt], ids[num_prompt:]))
    return found


@pytest.fixture(scope="module")
def learned(answers, target, config):
    """A drafter that predicts most of these answers."""
    return learn(config, target, [a.request(config.target_layer_ids) for a in answers], 70)


def load_like(drafter, cfg):
    other = new_drafter(cfg, 0)
    other.load_state_dict(drafter.state_dict())
    return other


def table(config):
    return hypotheses(config, THETAS, MASKS)


def named(config, name):
    return next(h for h in table(config) if h.name == name)


def trace(hypothesis, drafter, target, answer):
    """What a server with this fault would draft and count, round by round."""
    faulty = hypothesis.change(drafter)
    request = answer.request(drafter.cfg.target_layer_ids, hypothesis.tap_shift)
    accepted = replay(faulty, target.embedding, target.head, [request], K)[0]
    drafts, anchor = [], answer.num_prompt
    with torch.inference_mode():
        for count in accepted:
            logits = (
                states(faulty, target, answer, anchor, shift=hypothesis.tap_shift)[1:]
                @ target.head.T
            )
            drafts.append(logits.argmax(-1))
            anchor += count + 1
    return Trace("t", answer, accepted, torch.stack(drafts))


def states(drafter, target, answer, anchor, context=None, at=None, shift=0):
    """Hidden states [S, H] of one block after `anchor`; its context may be given."""
    request = answer.request(drafter.cfg.target_layer_ids, shift)
    embeds = block_embeds(
        target.embedding, answer.ids[None, anchor : anchor + 1], drafter.cfg.mask_token_id, K + 1
    )
    with torch.inference_mode():
        context = context or drafter.context(request.features[None, :anchor])
        return drafter(context, embeds, torch.tensor([[at or anchor]]))[0, 0]


def test_answers_know_what_the_target_says(answers, target, config):
    assert all(float(answer.gaps.max()) == 0.0 for answer in answers), "greedy answers"
    first = answers[0]
    output = first.ids[first.num_prompt :].tolist()
    output[3] = (output[3] + 1) % 97
    changed = read_answer(target, config, first.ids[: first.num_prompt].tolist(), output)
    assert changed.gaps[:3].tolist() == [0.0, 0.0, 0.0]
    assert float(changed.gaps[3]) > 0


def test_our_own_drafts_agree_with_themselves(answers, learned, target):
    traces = [trace(AS_CONFIGURED, learned, target, answer) for answer in answers]
    own = compare(AS_CONFIGURED, learned, target.embedding, target.head, traces)
    assert own.drafts == sum(len(t.accepted) for t in traces) * K
    assert own.share(BOUND) == 1.0
    assert len(own.mismatches) <= 1, "one block at a time and all at once may part at a near tie"


def test_every_fault_is_told_from_all_others(answers, learned, target, config):
    known = table(config)
    assert len(known) >= 12
    for fault in known:
        traces = [trace(fault, learned, target, answer) for answer in answers[:3]]
        own = compare(AS_CONFIGURED, learned, target.embedding, target.head, traces)
        assert own.share(BOUND) < REPRODUCED, f"{fault.name} changes too little to be noticed"
        cause, ranking = explain(known, learned, target.embedding, target.head, traces, BOUND)
        assert cause == fault, [(h.name, share) for h, share in ranking]
        assert ranking[0][1] >= REPRODUCED > ranking[1][1], [(h.name, s) for h, s in ranking]


def test_weights_that_nobody_knows_are_no_known_fault(answers, learned, target, config):
    other = new_drafter(config, 9)
    traces = [trace(AS_CONFIGURED, other, target, answer) for answer in answers]
    cause, ranking = explain(table(config), learned, target.embedding, target.head, traces, BOUND)
    assert cause is None
    assert ranking[0][1] < 0.9


def test_a_change_that_hardly_matters_explains_nothing(answers, learned, target, config):
    """If one draft in a hundred differs, many hypotheses still reproduce the other 99."""
    traces = [trace(AS_CONFIGURED, learned, target, answer) for answer in answers]
    wrong = traces[0].drafts.clone()
    wrong[0, K - 1] = (wrong[0, K - 1] + 1) % 97
    assert traces[0].accepted[0] < K - 1, "or the count would not fit"
    traces[0] = replace(traces[0], drafts=wrong)
    lax = [*table(config), AS_CONFIGURED]
    cause, ranking = explain(lax, learned, target.embedding, target.head, traces, BOUND)
    assert (cause, ranking[0][0]) == (None, AS_CONFIGURED)
    assert ranking[0][1] >= REPRODUCED


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"rope_theta": 5.0}, "rope_theta 10000"),
        ({"mask_token_id": 0}, "mask_token_id 96"),
        ({"target_layer_ids": (0, 1, 3)}, "taps +1"),
    ],
)
def test_a_mislabelled_folder_is_named_without_an_engine(
    answers, learned, target, config, tmp_path, wrong, name
):
    cfg = replace(config, **wrong)
    folder = save_drafter(load_like(learned, cfg), tmp_path / "drafter", torch.float32)
    drafter = load_drafter(folder)
    read = [
        read_answer(target, cfg, a.ids[: a.num_prompt].tolist(), a.ids[a.num_prompt :].tolist())
        for a in answers
    ]
    better = fits_better(table(cfg), drafter, target.embedding, target.head, read, K)
    hypothesis, right, as_configured = better[0]
    assert hypothesis.name == name
    assert right > 1.2 * as_configured
    assert fits_better(table(config), learned, target.embedding, target.head, answers, K) == []


def test_an_untrained_drafter_fits_no_reading(answers, target, config):
    drafter = new_drafter(config, 4)
    assert fits_better(table(config), drafter, target.embedding, target.head, answers, K) == []


def test_drafts_of_other_rounds_are_refused(answers, learned, target):
    good = trace(AS_CONFIGURED, learned, target, answers[0])
    assert good.anchors[0] == answers[0].num_prompt
    assert good.anchors[1] == answers[0].num_prompt + good.accepted[0] + 1
    counts = [*good.accepted]
    counts[0] = (counts[0] + 1) % 3
    with pytest.raises(ValueError, match=r"round 0: .* belong to another round"):
        Trace("t", answers[0], counts, good.drafts)


def test_near_ties_are_listed_and_do_not_count_against():
    """A gap is small or large beside the largest logit of its slot."""
    ties = [Mismatch("t", 3, 1, 5, 6, 0.5, 1000.0), Mismatch("t", 3, 2, 5, 6, 0.5, 20.0)]
    found = Agreement(10, ties)
    assert found.near_ties(BOUND) == ties[:1]
    assert found.share(BOUND) == 0.9


# What each change says it does, computed another way.


def changed(name, drafter, target, answer, anchor):
    return states(named(drafter.cfg, name).change(drafter), target, answer, anchor)


def test_positions_move_the_block_alone(answers, learned, target):
    answer, anchor = answers[3], 20
    features = answer.request(learned.cfg.target_layer_ids).features[None, :anchor]
    later = states(learned, target, answer, anchor, at=anchor + 1)
    torch.testing.assert_close(changed("position +1", learned, target, answer, anchor), later)
    with torch.inference_mode():
        moved = learned.context(torch.cat([features[:, :1], features], 1))
    moved = [(key[:, :, 1:], value[:, :, 1:]) for key, value in moved]
    earlier = states(learned, target, answer, anchor, moved)
    torch.testing.assert_close(changed("position -1", learned, target, answer, anchor), earlier)


def test_short_context_hides_the_last_token_and_moves_nothing(answers, learned, target):
    answer, anchor = answers[3], 20
    features = answer.request(learned.cfg.target_layer_ids).features[None, : anchor - 1]
    with torch.inference_mode():
        context = learned.context(features)
    torch.testing.assert_close(
        changed("short context", learned, target, answer, anchor),
        states(learned, target, answer, anchor, context),
    )


def test_interleaved_rope_is_the_other_layout(answers, learned, target, monkeypatch):
    answer, anchor = answers[3], 20
    found = changed("rope interleaved", learned, target, answer, anchor)

    def interleaved(x, rope):
        cos, sin = (part[..., : x.shape[-1] // 2].repeat_interleave(2, -1) for part in rope)
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos + turned * sin

    monkeypatch.setattr(model, "rotate", interleaved)
    torch.testing.assert_close(found, states(learned, target, answer, anchor), rtol=1e-4, atol=1e-4)


def test_key_norm_spoils_the_context_keys_of_later_layers_only(answers, learned, target):
    features = answers[0].request(learned.cfg.target_layer_ids).features[None]
    with torch.inference_mode():
        good = learned.context(features)
        bad = named(learned.cfg, "key norm").change(learned).context(features)
    gain = [layer.self_attn.k_norm.weight.detach() for layer in learned.layers]
    torch.testing.assert_close(good[0], bad[0])
    torch.testing.assert_close(good[1][1], bad[1][1])
    assert not torch.allclose(gain[0], gain[1])
    before, after = (keys[0, 0, 0] for keys in (good[1][0], bad[1][0]))  # position 0: no rotation
    torch.testing.assert_close(after.clone(), before.clone() / gain[1] * gain[0])


def test_causal_slots_do_not_see_later_ones(answers, learned, target):
    causal = named(learned.cfg, "is_causal 1").change(learned)
    features = answers[0].request(learned.cfg.target_layer_ids).features[None]
    embeds = block_embeds(target.embedding, torch.tensor([[3, 4]]), 96, K + 1)
    other = embeds.clone()
    other[:, :, 3] += 1.0
    anchors = torch.tensor([[7, 15]])
    with torch.inference_mode():
        before = causal(causal.context(features), embeds, anchors)
        after = causal(causal.context(features), other, anchors)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.equal(before[:, :, 4], after[:, :, 4])


def test_slots_shifted_reads_the_slot_before(answers, learned, target):
    answer, anchor = answers[3], 20
    found = changed("slots shifted", learned, target, answer, anchor)
    torch.testing.assert_close(found[1:], states(learned, target, answer, anchor)[:-1])
