"""Features of a target: equal with and without padding and shared prefixes."""

import pytest
import torch

from dflash.drafter_config import default_taps
from dflash.target_model import common_prefix, load_target

TAPS = (1, 2, 4)
PAIRS = ("llama-float32", "qwen3-float32")


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (24, (1, 6, 11, 16, 21)),
        (28, (1, 7, 13, 19, 25)),
        (36, (1, 9, 17, 25, 33)),
        (64, (1, 16, 31, 46, 61)),
    ],
)
def test_default_taps_are_those_of_the_published_drafters(layers, taps):
    assert default_taps(layers, 5) == taps
    assert default_taps(layers, 1) == (layers // 2,)


def test_features_are_hidden_states_at_tap_plus_one(target):
    ids = torch.randint(0, 90, (1, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1][0] for i in TAPS], dim=-1)
    torch.testing.assert_close(target.features(ids.tolist(), TAPS)[0].taps, expected)


def test_a_shared_prefix_and_padding_change_nothing(target):
    batch = [[5, 6, 7, 8, 1], [5, 6, 7, 9, 2, 3, 4], [5, 6, 7, 8]]
    assert common_prefix(batch) == 3
    for ids, together in zip(batch, target.features(batch, TAPS), strict=True):
        alone = target.features([ids], TAPS)[0]
        torch.testing.assert_close(together.taps, alone.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.last, alone.last, rtol=1e-4, atol=1e-4)


def test_common_prefix_leaves_a_token():
    assert common_prefix([[1, 2, 3], [1, 2, 3]]) == 2
    assert common_prefix([[1], [1, 2]]) == 0
    assert common_prefix([[1, 2, 3]]) == 0


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"is not a model folder.*target\.path"):
        load_target(tmp_path, torch.float32)
