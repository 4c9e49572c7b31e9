"""How prompts end: in the engine, in the folder's template, in traffic."""

import pytest

from jobs.proof.template_check import Endings, judge

THINK, PLAIN = [5, 6, 7], [5]
QWEN = {None: PLAIN, True: PLAIN, False: THINK}  # as Qwen3: a closed think block when it is off


@pytest.mark.parametrize(
    ("prompt", "mode", "verdict"),
    [
        ([1, 2, 5], None, "same"),
        ([1, 2, 5], True, "same"),
        ([1, 2, 5, 6, 7], False, "same"),
        ([1, 2, 5, 6, 7], None, "other"),  # recorded when the server's default was off
        ([1, 2, 5], False, "other"),
        ([1, 2, 3], None, "none"),  # a plain completion
    ],
)
def test_a_prompt_must_end_as_its_mode_does(prompt, mode, verdict):
    assert judge(Endings(engine=QWEN, folder=QWEN), prompt, mode) == verdict


def test_a_template_of_the_command_line_is_noticed():
    served = Endings(engine={key: [9] for key in QWEN}, folder=QWEN)
    assert judge(served, [1, 2, 5], None) == "other"
    assert judge(served, [1, 2, 9], None) == "same"


def test_a_template_without_generation_prompt_says_nothing():
    empty = {key: [] for key in QWEN}
    assert judge(Endings(engine=empty, folder=empty), [1, 2, 5], None) == "none"
