"""Which rounds fall into which slice."""

import pytest

from dflash.acceptance import num_rounds
from jobs.dataset.slices import slices, taus_by_slice


def row(
    domain="a",
    prompt=10,
    temperature: float | None = 0.0,
    thinking=None,
    language=None,
    shaped: str | None = "",
):
    return {
        "domain": domain,
        "prompt_ids": [0] * prompt,
        "temperature": temperature,
        "thinking": thinking,
        "language": language,
        "shaped": shaped,
    }


def test_requests_fall_into_slices_by_their_fields():
    rows = [
        row("a", 128, 0.0, True, "de"),
        row("b", 129, 0.5, False),
        row("b", 9000, 0.7, None, "de"),
        row("c", 5, None),
    ]
    walks = [[1, 0], [2], [3], []]
    found = slices(rows, walks)
    assert found["domain"] == {"a": [[1, 0], [], [], []], "b": [[], [2], [3], []]}
    assert found["language"] == {"de": [[1, 0], [], [3], []], "unknown": [[], [2], [], []]}
    assert list(found["prompt tokens"]) == ["1..128", "129..512", "8193.."]
    assert list(found["temperature"]) == ["0", "0..0.5", "0.5..1"]
    assert list(found["thinking"]) == ["off", "on", "unknown"]
    for parts in found.values():
        assert sum(num_rounds(part) for part in parts.values()) == num_rounds(walks)


def test_rounds_fall_into_slices_by_where_their_anchor_stands():
    """The anchors are 0, 32 (the 33rd token) and 34 in the first request, and 0 in the second."""
    found = slices([row(), row()], [[31, 1, 0], [5]])["place in the answer"]
    assert found == {"1..32": [[31], [5]], "33..128": [[1, 0], []]}


@pytest.mark.parametrize("walks", [[[1], [2]], [[1], []]])
def test_a_dimension_that_separates_nothing_is_left_out(walks):
    assert list(slices([row(), row()], walks)) == ["domain"]


def test_shaped_answers_are_a_slice_of_their_own_and_leave_temperatures_alone():
    rows = [row(), row(shaped="logit_bias,min_p"), row(shaped="response_format"), row(shaped=None)]
    found = slices(rows, [[1], [0], [0], [3]])
    assert list(found["shaped"]) == ["logit_bias,min_p", "plain", "response_format", "unknown"]
    assert found["shaped"]["plain"] == [[1], [], [], []]
    assert "temperature" not in found, "all are at 0"


def test_tau_of_every_slice_at_every_k():
    rows = [row("a"), row("b")]
    found = taus_by_slice(rows, {1: [[1, 1], [0]], 3: [[3], [1, 0]]})
    assert found == {"domain a": {1: 2.0, 3: 4.0}, "domain b": {1: 1.0, 3: 1.5}}
