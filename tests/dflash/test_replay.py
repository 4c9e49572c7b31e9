"""Replay against its plain definition: a draft is the argmax over the whole vocabulary, of equal
logits the lowest token id. In both dtypes, with ties, and with products that round differently."""

import math

import pytest
import torch

import dflash.replay
from dflash.model import Drafter, against
from dflash.replay import Request, draft_hidden, jumps, replay
from dflash.training_step import generator

K, PROMPT, ANSWER = 4, 6, 60


class Whole(Drafter):
    """Hidden states of small whole numbers, by anchor, its token and slot alone. With a head of -1,
    0 and 1 a logit is a whole number below 256: exact in bfloat16, in any batch and any order of
    addition, and ties are everywhere."""

    def forward(self, context, embeds_BNSH, anchors_BN, starts_BN=None):
        table = torch.randint(-7, 8, (211, 32), generator=generator("hidden")).to(embeds_BNSH)
        token = embeds_BNSH[:, :, :1, 0].mul(8).round().long()
        slots = torch.arange(embeds_BNSH.shape[2])
        return table[(31 * anchors_BN[:, :, None] + 7 * slots + token) % len(table)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def world(request, config):
    """(drafter, embedding, head, recorded answers), in one dtype."""
    torch.manual_seed(0)
    dtype = request.param
    drafter = Whole(config).to(dtype)
    embedding = torch.randn(97, 32).to(dtype)
    head = torch.randint(-1, 2, (97, 32)).to(dtype)
    head[60:] = head[:37]  # many rows belong to two tokens, which always tie
    return drafter, embedding, head, [answer(drafter, embedding, head, i) for i in range(12)]


@torch.inference_mode()
def drafts(drafter, embedding, head, request, anchor):
    """Logits [K, V] after an anchor, computed for one request and one block at a time."""
    context = drafter.context(request.features[None, :anchor].to(embedding))
    at = torch.tensor([[anchor]])
    hidden = draft_hidden(drafter, embedding, context, request.ids[at], at, K)
    return drafter.logits(hidden[0, 0], head)


def answer(drafter, embedding, head, seed):
    """An answer that equals the drafts at two of three positions, and elsewhere has tied tokens."""
    draw, length = generator("answer", seed), PROMPT + ANSWER
    features = torch.randn(length, 96, generator=draw)
    request = Request(torch.randint(0, 97, (length,), generator=draw), PROMPT, features)
    anchor = PROMPT
    while anchor < length - 1:
        for row in drafts(drafter, embedding, head, request, anchor):
            if (anchor := anchor + 1) >= length:
                break
            tied = (row == row.max()).nonzero().flatten()
            follows = torch.rand((), generator=draw) < 0.67
            request.ids[anchor] = tied[0] if follows else tied[-1]
            if len(tied) > 1 and not follows:
                break
    return request


def plain(drafter, embedding, head, request):
    """Replay by its definition, without any optimisation."""
    rounds, anchor, last = [], request.num_prompt, len(request.ids) - 1
    while anchor < last:
        best = drafts(drafter, embedding, head, request, anchor).argmax(-1)
        recorded = request.ids[anchor + 1 : anchor + 1 + K]
        agree = (best[: len(recorded)] == recorded).int().cumprod(0).sum()
        rounds.append(min(int(agree), last - anchor - 1))
        anchor += rounds[-1] + 1
    return rounds


def test_the_lowest_of_equal_logits_is_the_draft(world):
    drafter, embedding, head, requests = world
    expected = [plain(drafter, embedding, head, request) for request in requests]
    counts = {count for rounds in expected for count in rounds}
    assert counts == set(range(K + 1)), "the test must see every count"
    assert replay(drafter, embedding, head, requests, K) == expected
    assert replay(drafter, embedding, head, requests, K, batch_tokens=1) == expected


ONE_BY_ONE, AHEAD = (0, 512), (math.inf, 512)


@pytest.fixture(params=[ONE_BY_ONE, AHEAD, (math.inf, 15)], ids=["one by one", "all", "by three"])
def windows(request, monkeypatch):
    """The sizes of the windows of anchors that replay drafts after, filled while it runs."""
    overhead, slots = request.param
    monkeypatch.setattr(dflash.replay, "SLOTS_OF_A_FORWARD", overhead)
    monkeypatch.setattr(dflash.replay, "PLACES_OF_A_SLOT", math.inf)
    monkeypatch.setattr(dflash.replay, "SLOTS_OF_A_REQUEST", slots)
    sizes = []

    def seen(*args):
        sizes.append(args[4].shape[1])
        return draft_hidden(*args)

    monkeypatch.setattr(dflash.replay, "draft_hidden", seen)
    yield sizes
    most = {ONE_BY_ONE: 1, AHEAD: ANSWER - 1}.get(request.param, 3)
    assert 1 <= max(sizes) <= most
    assert max(sizes) > 1 or most == 1, "no window was used"


def test_any_window_gives_the_same_rounds(world, windows):
    drafter, embedding, head, requests = world
    expected = [plain(drafter, embedding, head, request) for request in requests]
    assert replay(drafter, embedding, head, requests, K) == expected
    assert replay(drafter, embedding, head, requests[:1], K) == expected[:1]


def test_a_walk_jumps_over_the_anchors_that_it_accepts():
    assert jumps([2, 0, 1, 0, 3], room=9) == [0, 3, 4]
    assert jumps([2, 0, 1, 0, 3], room=4) == [0, 3], "the answer ends inside the window"
    assert jumps([7, 0], room=9) == [0]


@pytest.mark.parametrize(
    ("requests", "tau", "ahead"),
    [
        (1, 1.4, 64),  # 8 slots, 0.4 of them wasted: 3.2 < 24 + 1
        (8, 1.4, 64),  # 3.2 < 3 + 1
        (16, 1.4, 1),  # 3.2 > 1.5 + 1
        (1, 5.0, 1),  # 32 > 24 + 1
    ],
)
def test_more_anchors_are_drafted_after_only_where_that_is_cheaper(requests, tau, ahead):
    batch = object.__new__(dflash.replay._Batch)
    batch.embedding = torch.zeros(1)
    found = batch._ahead(torch.arange(requests), torch.full((requests,), 256), 8, tau)
    assert found == ahead


@pytest.mark.timeout(60)
def test_replay_ends_where_some_rows_round_unlike_the_whole(world, monkeypatch):
    """Logits of the candidates alone may round to another argmax than those of the whole head, in
    either direction. Only the whole head counts, and replay must not loop for ever."""
    drafter, embedding, head, requests = world
    calls, flips = [], []

    def product(hidden, rows):
        found = against(hidden, rows)
        if len(rows) == len(head):
            return found
        calls.append(len(rows))
        assert len(calls) < 5000, "this walk does not end"
        draw = generator("rounding", len(calls))
        step = torch.randint(-1, 2, found.shape, generator=draw).to(found)
        # One unit in the last place of bfloat16; 2.4e-6 is what float32 products were seen to do.
        moved = torch.where(step == 0, found, torch.nextafter(found, step * torch.inf))
        if found.dtype == torch.float32:
            moved = found * (1 + 2.4e-6 * step)
        flips.append(int((moved.argmax(-1) != found.argmax(-1)).sum()))
        return moved

    monkeypatch.setattr(dflash.replay, "against", product)
    expected = [plain(drafter, embedding, head, request) for request in requests]
    assert replay(drafter, embedding, head, requests[:4], K) == expected[:4]
    assert [replay(drafter, embedding, head, [r], K)[0] for r in requests] == expected
    assert sum(flips) > 20, "the test must see products that disagree"
