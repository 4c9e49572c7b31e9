"""Replay against its plain definition: a draft is the argmax over the whole vocabulary, of equal
logits the lowest token id. In both dtypes, with ties, and with products that round differently."""

import pytest
import torch

import dflash.replay
from dflash.model import Drafter, against
from dflash.replay import Request, draft_hidden, replay
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
