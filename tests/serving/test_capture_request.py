"""What the capture reads from a request: consent, labels, sampler, and what shapes the answer."""

import json

import pytest

from serving.capture_request import read, with_token_ids
from store.consent import consents
from store.labels import MAX_LABEL
from store.objects import decode
from store.privacy import answers

CONSENT = b"x-flywheel-consent"
DOMAIN = b"x-flywheel-domain"


def ask(headers=(), **fields):
    asked = read(list(headers), json.dumps({"model": "m", **fields}).encode())
    assert asked is not None
    return asked


@pytest.mark.parametrize(
    "values",
    [
        [b"false", b"true"],
        [b"true", b"false"],
        [b"false, false"],
        [b"true,no"],
        [b"off"],
        [b""],
        [b"\xff"],
    ],
)
def test_an_opt_out_in_any_copy_of_the_header_wins(values):
    assert not ask([(CONSENT, value) for value in values], metadata={"consent": True}).consents


def test_a_no_in_the_metadata_is_not_outvoted_by_a_header():
    for said in (False, "false", 0, "off", {}, []):
        assert not ask([(CONSENT, b"true")], metadata={"consent": said}).consents
    assert ask([(CONSENT, b"yes")], metadata={"consent": None}).record({})["consent"] is True
    assert ask(metadata={"consent": None}).record({})["consent"] is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata": {"consent": false, "consent": true}}',
        b'{"metadata": {"consent": "no", "c\\u006fnsent": true}}',
        b'{"metadata": {"consent": false}, "metadata": {"consent": true}}',
        b'{"metadata": {"consent": false}, "tools": [], "metadata": {}}',
    ],
)
def test_a_no_written_twice_in_the_body_is_a_no(body):
    asked = read([], body)
    assert asked is not None
    assert not asked.consents


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata": {"X-Flywheel-Consent": "false"}}',
        b'{"metadata": {"Consent": "false"}}',
        b'{"consent": false}',
        b'{"Consent": "off", "model": "m"}',
        b'{"consent": false, "consent": true}',
        b'{"con\\u0073ent": false, "consent": true}',
        b'{"extra_body": {"consent": false}}',
        b'{"extra_body": {"metadata": {"consent": 0}}}',
        b'{"extra_body": {"consent": 0}, "extra_body": {}}',
        b'{"extra_headers": {"X-Flywheel-Consent": "no"}}',
        b'{"metadata": "{\\"consent\\": false}"}',
        b'{"headers": [["x-flywheel-consent", "no"]]}',
    ],
)
def test_an_opt_out_that_ingest_honours_is_not_recorded(body):
    """The capture once looked for fewer spellings of an opt-out, and in fewer places."""
    asked = read([(CONSENT, b"true")], body)
    assert asked is not None
    assert not asked.consents
    assert not consents(*answers(decode(body))), "nor ingested"


def test_a_conversation_has_one_label_under_both_of_its_names():
    named = [
        ask(metadata={"conversation": "c1"}),
        ask(metadata={"conversation_id": "c1"}),
        ask([(b"x-flywheel-conversation", b"c1")], metadata={"conversation_id": "c2"}),
        ask([(b"x-flywheel-conversation-id", b"c1")], metadata={"conversation": "c2"}),
        ask(metadata={"conversation_id": "c1", "conversation": ""}),
    ]
    assert {asked.labels["conversation_id"] for asked in named} == {"c1"}
    assert ask(metadata={"conversation_id": 1234}).labels["conversation_id"] == "1234"


def test_one_label_in_utf8_latin1_and_metadata_is_one_domain():
    spellings = [
        ask([(DOMAIN, "büro".encode())]),
        ask([(DOMAIN, "büro".encode("latin-1"))]),
        ask([(DOMAIN, "bu\u0308ro".encode())]),  # u and a combining diaeresis
        ask(metadata={"domain": " büro "}),
    ]
    assert {asked.labels["domain"] for asked in spellings} == {"büro"}


def test_labels_are_bounded_and_printable_and_different_ones_stay_different():
    long = [
        ask(metadata={"conversation": "x" * 5000 + end}).labels["conversation_id"] for end in "ab"
    ]
    assert len(set(long)) == 2
    assert all(label is not None and len(label) == MAX_LABEL for label in long)
    asked = ask(metadata={"domain": "a\nb\u2028c", "tenant": "\n", "language": ["de"]})
    assert asked.labels["domain"] == "a\ufffdb\ufffdc"
    assert asked.labels["tenant"] is None
    assert asked.labels["language"] is None


def test_numbers_written_as_text_are_recorded_as_vllm_reads_them():
    asked = ask(
        temperature="0", top_p="0.9", top_k=5.0, seed=-1, max_tokens="16", stream="true",
        repetition_penalty="1.0", chat_template_kwargs={"enable_thinking": "no"},
    )  # fmt: skip
    row = asked.record({"top_k": 20})
    kept = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stream", "shaped", "thinking")
    assert [row[name] for name in kept] == [0.0, 0.9, 5, None, 16, True, [], True]
    assert ask(temperature=1e-6).record({})["temperature"] == 0.01  # vLLM: never sampled colder
    assert ask(top_k=2**40).record({})["top_k"] == 2**31 - 1
    assert ask(reasoning_effort="none").record({})["thinking"] is False


def test_a_record_names_what_shapes_the_answer():
    assert ask(temperature=0).record({})["shaped"] == []
    assert ask(temperature=0).record({"repetition_penalty": 1.1})["shaped"] == [
        "repetition_penalty"
    ]
    asked = ask(response_format={"type": "json_object"}, logit_bias={"5": -100})
    assert asked.record({})["shaped"] == ["logit_bias", "response_format"]


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"echo": True}, False),
        ({"echo": False, "prompt": "echo"}, True),
        ({"prompt_embeds": "AAAA"}, False),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, False),
        ({"messages": [{"content": 'an "image_url" in text'}]}, True),
    ],
)
def test_echo_and_pictures_are_not_recorded(fields, plain):
    assert ask(**fields).plain is plain


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1}',
        b' {"a": {"b": {}} }\r\n ',
        b'{"return_token_ids": false, "a": "}"}',
        '{"a": "\\"}ü"}'.encode(),
    ],
)
def test_asking_for_ids_changes_nothing_else(body):
    assert json.loads(with_token_ids(body)) == json.loads(body) | {"return_token_ids": True}


@pytest.mark.parametrize("body", [b"", b"[1]", b"{}", '{"a": 1}'.encode("utf-16"), b"\x1f\x8b"])
def test_a_body_that_is_no_object_is_nothing(body):
    assert read([], body) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1',
        b'{"temperature": NaN}',
        b'{"metadata": {"domain": "\\ud800"}}',  # half a character
        b'{"a":' + b"[" * 9999 + b"]" * 9999,
    ],
)
def test_damage_inside_the_object_is_named_not_guessed(body):
    with pytest.raises((ValueError, RecursionError)):
        read([], body)
