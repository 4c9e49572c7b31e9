"""DFlash 2: convolutions and selector against naive loops, its start, its replay, its folder."""

from dataclasses import replace

import pytest
import torch

from dflash.block_conv import BlockConv, convolve
from dflash.checkpoint import compat_key, load_drafter, read_config, save_drafter
from dflash.decode import choose_drafts, decode
from dflash.diagnose import AS_CONFIGURED, Trace, compare, draft_scores, read_answer
from dflash.drafter_config import PUBLISHED_HEAD, DrafterConfig
from dflash.model import Drafter, block_embeds, new_drafter, reshaped
from dflash.replay import Request, replay
from dflash.sampling import Sampling
from dflash.training_step import generator
from tests.helpers.tiny import served

PAIRS = ("qwen3-float32",)
HEAD = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 5}


@pytest.fixture(scope="module")
def shape(config: DrafterConfig) -> DrafterConfig:
    return replace(config, **HEAD)


@pytest.fixture(scope="module")
def second(shape, trained) -> Drafter:
    """A trained body with a head of random weights: every part of it changes some drafts."""
    drafter, draw = reshaped(trained, shape, seed=0), generator("second")
    for name, param in drafter.named_parameters():
        if "_conv." in name:
            param.data += 0.03 * torch.randn(param.shape, generator=draw)
        elif name.startswith("candidate_selector."):
            param.data = torch.randn(param.shape, generator=draw) * 0.35
    return drafter


def test_the_convolution_equals_a_naive_loop():
    """All terms of a block; nothing of the block before, nothing of a later slot."""
    torch.manual_seed(0)
    x, base, dynamic = torch.randn(2, 3, 4, 6), torch.randn(3, 6), torch.randn(2, 3, 4, 3, 2)
    wanted = torch.zeros_like(x)
    for b, n, i, c in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        for t in range(3):
            if i >= t:
                kernel = base[t, c] + dynamic[b, n, i, t, c // 3]
                wanted[b, n, i, c] += kernel * x[b, n, i - t, c]
    torch.testing.assert_close(convolve(x, base, dynamic), wanted)
    short = convolve(x[:, :, :2], base, dynamic[:, :, :2])  # a block shorter than the kernel
    torch.testing.assert_close(short, wanted[:, :, :2])
    example = convolve(
        torch.tensor([[2.0], [4.0]]), torch.tensor([[1], [0.5]]), torch.zeros(2, 2, 1)
    )
    assert example.flatten().tolist() == [2, 5]


def test_the_convolution_surrounds_the_sublayer_and_stays_in_its_block(shape):
    conv = BlockConv(shape)
    torch.nn.init.normal_(conv.base_kernel)
    torch.nn.init.normal_(conv.kernel_projection.weight)
    x = torch.randn(1, 12, 32)
    kernels = conv.kernel_projection(x).view(1, 2, 6, 2, 3, 4)
    before = convolve(x.view(1, 2, 6, 32), conv.base_kernel[0], kernels[..., 0, :, :])
    wanted = convolve(before.tanh(), conv.base_kernel[1], kernels[..., 1, :, :])
    found = conv(x, 6, torch.tanh)
    torch.testing.assert_close(found, wanted.flatten(1, 2))
    changed = x.clone()
    changed[:, 5] += 1  # the last slot of the first block
    assert torch.equal(conv(changed, 6, torch.tanh)[:, 6:], found[:, 6:])


def test_the_selector_equals_a_naive_loop(second):
    torch.manual_seed(0)
    hidden, logits, previous = torch.randn(4, 32), torch.randn(4, 97), torch.tensor([3, 3, 9, 96])
    selector = second.candidate_selector
    found = selector.rescored(hidden, logits, previous)
    A, B = selector.predecessor_codebook, selector.successor_codebook
    for row in range(4):
        state = A[previous[row]] * (selector.hidden_projection.weight @ hidden[row])
        best = logits[row].argsort(descending=True)[:5].tolist()
        for token in range(97):
            score = (
                logits[row, token] + state @ B[token] if token in best else torch.tensor(-torch.inf)
            )
            torch.testing.assert_close(found[row, token], score)


def test_without_training_it_drafts_as_the_plain_body_bit_for_bit(shape, trained, target, samples):
    body = reshaped(trained, replace(shape, block_size=4), seed=5)
    assert reshaped(trained, trained.cfg, seed=5) is trained
    new, plain = new_drafter(shape, seed=0), new_drafter(trained.cfg, seed=0)
    embeds = block_embeds(target.embedding, torch.tensor([[3, 4]]), 96, 4)
    anchors, previous = torch.tensor([[9, 20]]), torch.tensor([[[1, 2, 3, 4]] * 2])
    for two, one in ((body, trained), (new, plain)):
        hidden = [d(d.context(samples[0].features[None]), embeds, anchors) for d in (two, one)]
        assert torch.equal(*hidden)
        scores = two.scores(hidden[0], target.head, previous)
        logits = one.logits(hidden[1], target.head)
        shown = scores.isfinite()
        assert torch.equal(scores[shown], logits[shown])
        assert torch.equal(scores.argmax(-1), logits.argmax(-1))
    requests = [Request(s.ids, int((~s.loss_mask).sum()), s.features) for s in samples]
    borrowed = (target.embedding, target.head, requests, 3)
    assert replay(body, *borrowed) == replay(trained, *borrowed)


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_replay_equals_the_reference_decoder_round_by_round(
    second, trained, target, samples, num_drafts
):
    prompts = [sample.ids[~sample.loss_mask].tolist() for sample in samples[:6]]
    real, found = zip(*(served(target, second, p, 40, num_drafts) for p in prompts), strict=True)
    walks = replay(second, target.embedding, target.head, found, num_drafts)
    assert walks == [answer.accepted for answer in real]
    plain = replay(trained, target.embedding, target.head, found, num_drafts)
    assert walks != plain, "the head must change something"
    assert max(map(max, walks)) == num_drafts
    for answer, sample in zip(real, samples[:6], strict=True):
        assert answer.output_ids == sample.ids[sample.loss_mask].tolist(), "drafting changed text"


def test_features_at_the_anchor_and_other_blocks_change_nothing(second, target, samples):
    features, tokens = samples[0].features[None], samples[0].ids
    embeds = block_embeds(target.embedding, tokens[[9, 20]][None], 96, 6)

    def hidden(features, anchors):
        with torch.no_grad():
            return second(second.context(features), embeds, torch.tensor([anchors]))

    before = hidden(features, [9, 20])
    later = features.clone()
    later[:, 9:] += 1
    assert torch.equal(hidden(later, [9, 20])[:, 0], before[:, 0])
    assert not torch.equal(hidden(later, [9, 20])[:, 1], before[:, 1])
    assert torch.equal(hidden(features, [9, 30])[:, 0], before[:, 0])


@torch.inference_mode()
def test_sampled_drafts_are_drawn_from_the_scores_after_the_draft_before(second, target):
    """q is what rejection sampling needs (tests/dflash/test_sampling.py): known, and drawn from."""
    torch.manual_seed(0)
    hidden, warm, draw = torch.randn(3, 32), Sampling(temperature=0.7, top_k=4), generator("q")
    seen = torch.zeros(97)
    for _ in range(800):
        drafts, q = choose_drafts(second, hidden, target.head, 17, warm, draw)
        seen[drafts[0]] += 1
    previous = torch.tensor([17, *drafts[:-1]])
    wanted = (second.scores(hidden, target.head, previous) / 0.7).softmax(-1)
    assert q is not None
    torch.testing.assert_close(q, wanted)
    assert [int((row > 0).sum()) for row in q] == [5, 5, 5], "the candidates, whatever top_k is"
    assert float((seen / 800 - q[0]).abs().sum()) < 0.12  # of 800 draws, 0.05 is expected
    greedy, none = choose_drafts(second, hidden, target.head, 17, Sampling(), draw)
    assert none is None
    previous = torch.tensor([17, *greedy[:-1]])
    assert greedy == second.scores(hidden, target.head, previous).argmax(-1).tolist()


@pytest.mark.parametrize("probabilistic", [False, True])
def test_sampled_decoding_accepts_drafts_of_the_head(second, target, probabilistic):
    hot = Sampling(temperature=0.5)
    found = decode(target, [5, 17, 3, 60], 30, (), second, 3, hot, probabilistic, seed=1)
    assert sum(found.accepted) + len(found.accepted) == 29
    assert max(found.accepted) > 0


@torch.inference_mode()
def test_drafts_that_an_engine_would_make_are_reproduced(second, target, samples):
    """`compare` judges each draft after the engine's own draft before it."""
    prompt = samples[2].ids[~samples[2].loss_mask].tolist()
    real, request = served(target, second, prompt, 40, 5)
    answer = read_answer(target, second.cfg, prompt, real.output_ids)
    anchors = [len(prompt)]
    for count in real.accepted[:-1]:
        anchors.append(anchors[-1] + count + 1)
    anchors = torch.tensor(anchors)
    drafts = torch.zeros(len(anchors), 5, dtype=torch.int64)
    for k in range(5):
        scores = draft_scores(second, target.embedding, target.head, request, anchors, drafts)
        drafts[:, k] = scores[:, k].argmax(-1)
    trace = Trace("a", answer, real.accepted, drafts)
    assert not compare(AS_CONFIGURED, second, target.embedding, target.head, [trace]).mismatches
    drafts[3, 4] = (drafts[3, 4] + 1) % 90
    wrong = Trace("a", answer, real.accepted, drafts)
    found = compare(AS_CONFIGURED, second, target.embedding, target.head, [wrong])
    assert [m.slot for m in found.mismatches] == [5]


def test_a_folder_has_the_published_names_and_reads_back_bit_for_bit(second, shape, tmp_path):
    folder = save_drafter(second, tmp_path / "a", torch.float32)
    again = load_drafter(folder)
    assert again.cfg == shape == read_config(folder)
    for name, tensor in second.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    names = set(second.state_dict())
    assert {
        "layers.1.attention_conv.base_kernel",
        "layers.1.mlp_conv.kernel_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
    } < names
    raw = shape.to_json("float32")
    assert raw["architectures"] == ["DFlash2DraftModel"]
    assert raw["dflash_config"].items() > HEAD.items()
    # Published folders name these too, and the block size beside them.
    plain = {
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "block_size": raw["block_size"],
    }
    dflash = raw["dflash_config"] | plain | {"final_logit_softcapping": None}
    del raw["block_size"]
    assert DrafterConfig.from_json(raw | {"dflash_config": dflash}) == shape
    capped = raw | {"dflash_config": dflash | {"final_logit_softcapping": 30.0}}
    with pytest.raises(ValueError, match=r"final_logit_softcapping = 30\.0.*not supported"):
        DrafterConfig.from_json(capped)


def test_keys_of_plain_drafters_stay_what_they_were(config, shape):
    """Registered versions carry these hashes; a new optional part must not change them."""
    assert compat_key(config, "t") == "cc7f2407d9f24ebf"
    assert compat_key(shape, "t") != compat_key(config, "t")
    assert compat_key(replace(config, **PUBLISHED_HEAD), "t") != compat_key(shape, "t")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"selector_top_k": 0}, "needs all of conv_kernel_size"),
        ({"conv_group_size": 5}, "conv_group_size 5 does not divide hidden_size 32"),
        ({"draft_vocab_size": 40}, "draft_vocab_size does not go with DFlash 2"),
        ({"selector_top_k": 98}, "selector_top_k 98 is above vocab_size 97"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(shape, change, told):
    with pytest.raises(ValueError, match=told):
        replace(shape, **change)


def test_other_heads_and_incomplete_ones_are_refused_by_name(shape):
    raw = shape.to_json("float32")
    for name in ("Qwen3DSparkModel", "LiLiCorrDraftModel"):
        with pytest.raises(ValueError, match=f"drafter \\({name}\\): its head is not read here"):
            DrafterConfig.from_json(raw | {"architectures": [name]})
    bare = {k: v for k, v in raw["dflash_config"].items() if k != "selector_rank"}
    with pytest.raises(ValueError, match=r"its config\.json lacks selector_rank"):
        DrafterConfig.from_json(raw | {"dflash_config": bare})
