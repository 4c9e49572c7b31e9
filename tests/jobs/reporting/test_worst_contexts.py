"""What a page shows of people's text: stretches without an accepted draft, rare words masked."""

import pytest

from jobs.reporting.worst_contexts import common_words, longest_stretch, masked


@pytest.mark.parametrize(
    ("accepted", "stretch"),
    [
        ([2, 0, 0, 1], (4, 6)),
        ([0, 0, 0, 1], (1, 4)),
        ([0, 3, 0, 0, 3], (6, 8)),
        ([1, 2, 0], (1, 1)),  # the last round may be the end of the text
        ([], (1, 1)),
    ],
)
def test_the_longest_stretch_is_counted_in_output_tokens(accepted, stretch):
    assert longest_stretch(accepted) == stretch


def test_only_words_that_several_conversations_share_are_shown():
    letter = "Please note: Zoe, the order 35 is on its way, please"
    answers = [(f"c{i}", letter) for i in range(5)]
    answers += [("c9", "mail ana@example.org " * 9)]  # often, but in one conversation
    text = "Please Zoe, mail ana@example.org: the order 35 is on"
    shown = "Please ***, **** ***@*******.***: the order ** is on"
    assert masked(text, common_words(answers)) == shown
    hidden = "".join("*" if c.isalnum() else c for c in text)
    assert masked(text, common_words(answers[:4])) == hidden


def test_numbers_and_names_are_masked_however_common_they_are():
    common = common_words((f"c{i}", "call Maria, 555 or ext2") for i in range(9))
    assert masked("Call Maria, 555 or ext2", common) == "Call *****, *** or ****"
