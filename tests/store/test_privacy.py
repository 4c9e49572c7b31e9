"""Records without consent, or redacted ones, are counted and never kept."""

import time

import pytest

from store.log_formats import NotUsed, Reject
from tests.helpers.logs import line, pair, parse, reason

NO_CONSENT = NotUsed(0, "no_consent")


@pytest.mark.parametrize(
    "consent", [False, "false", 0, "maybe", [], "no", "off", "", "true, false", "false, false"]
)
def test_no_consent_is_counted_and_never_kept(tmp_path, consent):
    assert parse(tmp_path / "l", line(consent=consent, finish_reason="error")) == [NO_CONSENT]


@pytest.mark.parametrize(
    "data",
    [
        b'{"v": 1, "consent": false, "consent": true, "prompt_ids": [1], "output_ids": [2, 3]}\n',
        b'{"v": 1, "consent": true, "consent": null, "consent": "off", "prompt_ids": [1]}\n',
        pair({"metadata": {"consent": False}}, {"choices": []}),
        pair({"metadata": {"consent": "yes"}}, headers={"X-Flywheel-Consent": "true, no"}),
        pair({"headers": {"x-flywheel-consent": ["false", "true"]}}),
        pair({"extra_body": {"metadata": {"Consent": 0}}}),
        pair(metadata={"consent": "nope"}),
        line(v=2, consent=False),
        b'{"messages": "my secret", "consent": false}\n',
        b'[{"consent": false, "secret": 1}]\n',
        pair(headers=[["X-Flywheel-Consent", "false"]]),
        pair({"headers": [{"name": "X-Flywheel-Consent", "value": "off"}]}),
        pair({"headers": ["Accept: *", "X-Flywheel-Consent: false"]}),
        pair({"headers": ["X-Flywheel-Consent", "false"]}),
        pair({"headers": "accept: *\r\nx-flywheel-consent: no"}),
        pair({"metadata": '{"consent": false}'}),
        b'["x-flywheel-consent", "false", \n',
        b'{"headers": [{"name": "X-Flywheel-Consent", "value": "false"}, \n',
        b'{"headers": [{"value": "false", "name": "X-Flywheel-Consent"}, \n',
        b"{'secret': 1, 'consent': False}\n",
        b"headers [(b'x-flywheel-consent', b'false')]\n",
        b"x-flywheel-consent: true, false\n",
        b"consent: false\n",
        line(consent="false")[:-3] + b"\n",
        b'{"v": 1, "consent": fal',
        b'{"v": 1, "consent"',
        b'{"v": 1, "consent": "true',
        b'{"secret": 1, "con\\u0073ent": false, }\n',
        b'"{\\"consent\\": false}" and more\n',
    ],
)
def test_a_refusal_is_seen_before_anything_else_refuses_the_line(tmp_path, data):
    """Records without consent once got into rejects/ if something else was wrong with them."""
    assert parse(tmp_path / "l", data) == [NO_CONSENT]


@pytest.mark.parametrize(
    "data",
    [
        b'{"consent": null, "v": 1, \n',
        b'{"consent": "true", x\n',
        b"I consent to it\n",
        b"{'consent': None, 'v': 1}\n",
        b'["x-flywheel-consent", "yes", \n',
        b'{"headers": [{"name": "X-Flywheel-Consent", "value": "true"}, \n',
        b'{"answer": "my consent", "role": \n',
    ],
)
def test_damaged_lines_that_refuse_nothing_are_kept(tmp_path, data):
    assert reason(tmp_path / "l", data) == "not_json"


def test_a_refusal_in_a_torn_record_does_not_take_the_next_one(tmp_path):
    torn = b'{"v": 1, "consent": false, "prompt_ids": [1, 2'
    outcomes = parse(tmp_path / "l", torn + line())
    assert outcomes[0] == NO_CONSENT
    assert outcomes[1]["request_id"] == "r1"


REDACTED = "redacted-by-litellm"


@pytest.mark.parametrize(
    "data",
    [
        pair({"messages": [{"role": "user", "content": REDACTED}]}),
        pair({"prompt": "mail [REDACTED] to <EMAIL_REDACTED>"}),
        pair({"prompt": "mail [[REDACTED: e-mail address_1_]]"}),
        pair(response={"choices": [{"token_ids": [3, 4], "message": {"content": "[redacted]"}}]}),
        pair({"messages": [{"content": REDACTED}]}, {"choices": [{"text": "clear"}]}),
        pair(redacted=True),
        b'{"messages": "redacted-by-litellm", "response": "a clear answer"}\n',
        pair({"messages": [{"content": "<REDACTED>"}]}).replace(b"<", rb"\u003c"),  # as Go writes
        pair({"prompt": "[REDACTED]"}).replace(b"R", rb"\u0052"),
        pair({"messages": [{"content": "a"}], "system": "[REDACTED]"}),
        pair({"tools": [{"function": {"description": "<REDACTED>"}}]}),
        pair({"prompt": "a"}, {"choices": [], "prompt_text": "[REDACTED]"}),
    ],
)
def test_a_half_redacted_pair_is_counted_and_nothing_of_it_is_kept(tmp_path, data):
    """Its ids were once trained on, and readable answers of redacted logs got into rejects/."""
    assert parse(tmp_path / "l", data) == [NotUsed(0, "redacted")]


def test_of_a_torn_line_with_an_escaped_mark_nothing_is_kept(tmp_path):
    torn = pair({"prompt": "<REDACTED>"}).replace(b"<", rb"\u003c")[:-9] + b"\n"
    [found] = parse(tmp_path / "l", torn)
    assert (found.reason, found.raw) == ("not_json", b"")


@pytest.mark.parametrize(
    "request_",
    [
        b'"messages":[{"role":"user","role":"system","content":"[REDACTED]"}]',
        b'"messages":[{"content":"[REDACTED]","content":"clear"}]',
        b'"messages":' + b"[" * 800 + b'"[REDACTED]"' + b"]" * 800,
    ],
)
def test_a_mark_beside_a_doubled_name_or_deep_inside_ends_nothing(tmp_path, request_):
    """The search for a redaction mark once raised TypeError or RecursionError, and ended ingest."""
    data = b'{"request":{' + request_ + b'},"response":{}}\n'
    assert parse(tmp_path / "l", data) == [NotUsed(0, "redacted")]


NAMES = ["metadata", "consent", "domain", "adapter", "model", "choices", "messages"]


@pytest.mark.parametrize("name", NAMES)
def test_values_nested_as_deep_as_json_allows_end_nothing(tmp_path, name):
    for depth in (300, *range(800, 1000, 9)):  # how deep can be read depends on the caller's depth
        deep = b"[" * depth + b'"[REDACTED]"' + b"]" * depth
        objects = b'{"%s":' % name.encode() * depth + b"1" + b"}" * depth
        for value in (deep, objects):
            for data in (
                b'{"v":1,"prompt_ids":[1],"output_ids":[2,3],"%s":%s}\n' % (name.encode(), value),
                b'{"request":{"%s":%s},"response":{"choices":[]}}\n' % (name.encode(), value),
            ):
                assert len(parse(tmp_path / "l", data)) == 1


def test_a_long_line_of_brackets_takes_no_time(tmp_path):
    """The search for a redaction mark once took time quadratic in its length, or more."""
    start = time.monotonic()
    for text in (
        b"[" * 100_000,
        b"[REDACTED" + b"_" * 100_000,
        b"[" + b" " * 100_000,
        b"[a" * 9999,
    ):
        parse(tmp_path / "l", b'"redacted" ' + text + b"\n")
        parse(tmp_path / "l", b'"consent"' + text.replace(b"[", b"consent ") + b"\n")
    assert time.monotonic() - start < 10


def test_damaged_lines_with_a_mark_keep_no_bytes(tmp_path):
    (outcome,) = parse(tmp_path / "l", b'{"prompt": "redacted-by-litellm", "answer": "clear\n')
    assert outcome == Reject(0, "not_json", b"")


@pytest.mark.parametrize(
    "data",
    [
        pair({"messages": [{"content": "redacted"}]}),
        pair({"messages": [{"content": "see [the redacted report](x) (redacted)"}]}),
        pair({"metadata": {"tenant": "[REDACTED]"}}),
        line(domain="[REDACTED]"),
    ],
)
def test_a_word_or_a_label_is_no_redaction(tmp_path, data):
    assert isinstance(parse(tmp_path / "l", data)[0], dict)


def test_a_yes_in_a_list_of_headers_is_a_yes(tmp_path):
    for headers in ([["X-Flywheel-Consent", "true"]], [{"name": "x-flywheel-consent", "value": 1}]):
        (row,) = parse(tmp_path / "l", pair({"headers": headers}))
        assert row["consent"] is True


@pytest.mark.parametrize("consent", [True, "true", "1", "yes", "True"])
def test_consent(tmp_path, consent):
    (row,) = parse(tmp_path / "l", line(consent=consent))
    assert row["consent"] is True
