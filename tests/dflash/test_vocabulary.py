"""A reduced draft vocabulary: which tokens, how it is stored, and that every reader obeys it."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.sampled_rounds import chances
from dflash.checkpoint import convert_folder, load_drafter, save_drafter
from dflash.model import drafter_of, new_drafter
from dflash.replay import Request, replay
from dflash.sampling import GREEDY
from dflash.vocabulary import frequent_tokens, set_vocabulary
from tests.helpers.tiny import check_rounds, served


@pytest.fixture(scope="module")
def known(samples):
    """Every second token of the answers, so that a frequently drafted one is missing."""
    return torch.cat([s.ids[s.loss_mask] for s in samples]).unique()[::2]


@pytest.fixture(scope="module")
def reduced(trained, target, known):
    cfg = replace(trained.cfg, draft_vocab_size=len(known))
    head = {"lm_head.weight": torch.zeros(len(known), 32), "d2t": torch.zeros(len(known)).long()}
    drafter = drafter_of(cfg, trained.state_dict() | head)
    set_vocabulary(drafter, target.head, known)
    return drafter


def test_frequent_tokens_fill_up_with_the_lowest_ids():
    answers = [torch.tensor([9, 9, 7]), torch.tensor([7, 7, 5])]
    assert frequent_tokens(answers, 2, 10).tolist() == [7, 9]
    assert frequent_tokens(answers, 5, 10).tolist() == [0, 1, 5, 7, 9]


def test_other_tokens_are_never_drafted(reduced, target, known):
    hidden = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(0)).to(target.dtype)
    logits = reduced.logits(hidden, target.head)
    assert logits.shape == (4, 3, 97)
    assert logits.isfinite().nonzero()[:, -1].unique().tolist() == known.tolist()
    torch.testing.assert_close(logits[..., known], (hidden @ target.head.T)[..., known])


def test_replay_and_chances_equal_the_reference_decoder(reduced, trained, target, samples):
    others, found, decoded = 0, [], []
    for sample in samples:
        prompt = sample.ids[~sample.loss_mask].tolist()
        real, request = served(target, reduced, prompt, 40, 5)
        borrowed = (target.embedding, target.head)
        [rounds] = replay(reduced, *borrowed, [request], 5)
        found.append(rounds)
        decoded.append(real)
        [whole] = replay(trained, *borrowed, [request], 5)
        others += whole != rounds
        last = target.features([request.ids.tolist()], trained.cfg.target_layer_ids)[0].last
        given = chances(reduced, *borrowed, request, last, GREEDY, 5, False).given_text
        assert int(given[0].cumprod(0).sum()) == rounds[0]
    check_rounds(found, decoded, target)
    assert others > 2, "what is missing was never drafted: the test says nothing"


def test_an_answer_without_a_token_that_can_be_drafted(reduced, target, known):
    other = next(i for i in range(97) if i not in known.tolist())
    request = Request(torch.full((12,), other), 4, torch.randn(12, 96))
    assert replay(reduced, target.embedding, target.head, [request], 5) == [[0] * 7]


def test_a_vocabulary_of_one_token_is_one(trained, target, tmp_path):
    drafter = new_drafter(replace(trained.cfg, draft_vocab_size=1), seed=0)
    set_vocabulary(drafter, target.head, torch.tensor([7]))
    folder = save_drafter(drafter, tmp_path / "drafter", torch.float32)
    assert load_drafter(folder).draft_head(target.head)[0].tolist() == [7]


def test_a_folder_keeps_it_in_both_formats(reduced, target_folder, tmp_path):
    folder = save_drafter(reduced, tmp_path / "drafter", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    again = load_drafter(folder)
    assert again.cfg == reduced.cfg
    assert torch.equal(again.d2t, reduced.d2t)
    convert_folder(folder, tmp_path / "foreign", "speculators", target_folder, "target")
    convert_folder(tmp_path / "foreign", tmp_path / "back", "zlab", target_folder, "target")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": None}, "missing lm_head.weight"),
        ({"d2t": None}, "missing d2t"),
        ({"d2t": torch.arange(10)}, r"d2t is \(10,\)"),
        ({"d2t": torch.zeros(1)}, r"d2t is \(1,\)"),
        ({"d2t": torch.float32}, "d2t is stored as torch.float32"),
        ({"d2t": torch.bool}, "d2t is stored as torch.bool"),
        ({"norm.weight": torch.int8}, "norm.weight is stored as torch.int8"),
        ({"d2t": -1}, r"d2t does not give ascending token ids in 0\.\.96"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(reduced, tmp_path, change, message):
    folder = save_drafter(reduced, tmp_path / "drafter", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    [(name, value)] = change.items()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = (
            value
            if isinstance(value, torch.Tensor)
            else tensors[name].to(value)
            if isinstance(value, torch.dtype)
            else tensors[name].flip(0)
        )
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)
