"""The second loss of DFlash 2: its labels, weights, gradients, and what it teaches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn import functional as F

from dflash.acceptance import tau
from dflash.drafter_config import DrafterConfig
from dflash.frozen_head import ROWS_PER_CHUNK, Candidates, FrozenHeadLoss, with_recorded
from dflash.losses import choose_weights, recorded_token
from dflash.model import Drafter, in_head, new_drafter, reshaped
from dflash.optim import Muon, build_optimizers
from dflash.parallel import shard
from dflash.recall import Recall, recall
from dflash.replay import Request, draft_hidden, replay
from dflash.training_step import as_much, generator, selector_loss, step_batch, step_loss

PAIRS = ("qwen3-float32",)
HEAD = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}


@pytest.fixture(scope="module")
def shape(config: DrafterConfig) -> DrafterConfig:
    return replace(config, **HEAD)


def test_the_recorded_token_takes_the_place_of_the_last_candidate():
    found = with_recorded(torch.tensor([[4, 7], [4, 7], [4, 7]]), torch.tensor([7, 9, 4]))
    assert found.tolist() == [[4, 7], [4, 9], [4, 7]]
    scores = torch.tensor([[1.0, 3.0], [2.0, 0.0], [0.0, 0.0]])
    loss, hits = selector_loss(scores, found == torch.tensor([[7], [9], [4]]))
    torch.testing.assert_close(
        loss, F.cross_entropy(scores, torch.tensor([1, 1, 0]), reduction="none")
    )
    assert hits.tolist() == [True, False, True]


def test_candidates_and_their_gradient_equal_autograd():
    """Over three chunks; both losses reach the hidden states."""
    torch.manual_seed(0)
    rows = 2 * ROWS_PER_CHUNK + 90
    hidden, head = torch.randn(rows, 8, requires_grad=True), torch.randn(31, 8)
    labels, weights = torch.randint(31, (rows,)), torch.rand(rows)
    given = (labels[:, None], torch.ones(rows, 1), 0.0, labels, 4)
    loss, _, _, rivals, logits = FrozenHeadLoss.apply(hidden, head, torch.zeros(31), *given)
    second, _ = selector_loss(logits + rivals * 0.1, rivals == labels[:, None])
    ((loss + 2 * second) * weights).sum().backward()
    ours, hidden.grad = hidden.grad, None
    whole = hidden @ head.T
    four = with_recorded(whole.topk(4).indices, labels)
    assert torch.equal(rivals, four)
    place = (four == labels[:, None]).long().argmax(1)
    plain = F.cross_entropy(whole.gather(1, four) + four * 0.1, place, reduction="none")
    ((F.cross_entropy(whole, labels, reduction="none") + 2 * plain) * weights).sum().backward()
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-4, atol=1e-5)


def test_both_losses_weigh_a_block_alike():
    found = as_much(
        torch.tensor([[1.0, 1.0], [3.0, 0.0], [0.0, 0.0]]), torch.tensor([[3.0, 1.0]] * 3)
    )
    assert found.tolist() == [[2, 2], [4, 0], [0, 0]]


def gradients(drafter: Drafter, samples, target, forwards, kind="decay"):
    """Sums, and the gradient of a step cut into forwards, divided by the weight of all."""
    candidates, total = Candidates(torch.arange(97), 97, 0), 0
    weigh, second = choose_weights("dpace", 4.0), choose_weights(kind, 4.0)
    for picks in forwards:
        batch = step_batch(samples, picks, 12, 5, recorded_token, 0)
        borrowed = (target.embedding, target.head, candidates, generator("c"), weigh, 0.0, second)
        out = step_loss(drafter, batch, *borrowed)
        out.loss.backward()
        total = total + out.sums()
    return total, [p.grad for p in drafter.parameters()]


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_micro_batches_with_an_empty_one_give_the_gradient_of_the_batch(
    shape, samples, target, kind
):
    picks = [(0, i) for i in range(7)]
    cuts = ([picks], [picks[:5], picks[5:], []])
    (sums, whole), (part_sums, parts) = (
        gradients(new_drafter(shape, 0), samples, target, forwards, kind) for forwards in cuts
    )
    torch.testing.assert_close(part_sums, sums, rtol=1e-6, atol=0)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_sharded_parameters_get_the_same_gradient(shape, samples, target):
    """The selector is used outside of the drafter's forward, so FSDP must gather it there."""
    picks = [[(0, 0), (0, 1)]]
    sums, plain = gradients(new_drafter(shape, 0), samples, target, picks)
    store = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = new_drafter(shape, 0)
        shard(sharded)
        found: list[Any]
        again, found = gradients(sharded, samples, target, picks)
        torch.testing.assert_close(again, sums)
        for one, other in zip(plain, found, strict=True):
            torch.testing.assert_close(one, other.full_tensor())
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("only_head", [False, True], ids=["all", "head"])
def test_training_raises_tau_and_the_head_alone_leaves_the_body(
    shape, trained, samples, target, only_head
):
    drafter = reshaped(trained, shape, seed=0)
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    for name, param in drafter.named_parameters():
        param.requires_grad_(in_head(name) or not only_head)
    optimizers = build_optimizers(drafter, "muon", 1e-2, torch.float32)
    tables = [p for p in optimizers[0].param_groups[0]["params"] if len(p) == 97]
    assert isinstance(optimizers[0], Muon)
    assert not tables, "codebooks are not orthogonalised"
    borrowed = (target.embedding, target.head)
    requests = [Request(s.ids, int((~s.loss_mask).sum()), s.features) for s in samples]
    start = tau(replay(drafter, *borrowed, requests, 5))
    for step in range(40):
        batch = step_batch(samples, [(step, i) for i in range(0, 12, 2)], 12, 5, recorded_token, 0)
        candidates = Candidates(torch.arange(97), 97, 0)
        weigh = choose_weights("dpace", 4.0)
        out = step_loss(drafter, batch, *borrowed, candidates, generator("c", step), weigh)
        (out.loss / out.weight).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert tau(replay(drafter, *borrowed, requests, 5)) > 1.1 * start
    changed = {n for n, p in drafter.named_parameters() if not torch.equal(p, before[n])}
    assert all(map(in_head, changed)) == only_head
    assert {n for n in before if in_head(n)} <= changed


def test_recall_equals_its_definition(shape, trained, samples, target):
    drafter, total, wanted = reshaped(trained, shape, seed=0), Recall(), [0, 0, 0, 0]
    borrowed = (target.embedding, target.head)
    requests = [Request(s.ids, int((~s.loss_mask).sum()), s.features) for s in samples[:4]]
    walks = replay(drafter, *borrowed, requests, 5)
    for request, rounds in zip(requests, walks, strict=True):
        total += recall(drafter, *borrowed, request, rounds, 5, top_k=6)
        anchor = request.num_prompt
        for accepted in rounds:
            context = drafter.context(request.features[None, :anchor])
            at = torch.tensor([[anchor]])
            with torch.no_grad():
                hidden = draft_hidden(drafter, target.embedding, context, request.ids[at], at, 5)
            among = (hidden[0, 0] @ target.head.T).topk(6).indices.tolist()
            room = min(5, len(request.ids) - anchor - 2)
            right = [int(request.ids[anchor + 1 + k]) in among[k] for k in range(room)]
            looked_at = right[: accepted + 1]
            perfect = (right + [False]).index(False)
            for i, n in enumerate((len(looked_at), sum(looked_at), 1, perfect)):
                wanted[i] += n
            anchor += accepted + 1
    assert [total.slots, total.hits, total.rounds, total.accepted] == wanted
    assert total.metrics()["val_oracle_tau"] >= tau(walks)
    assert Recall().metrics() == {}
