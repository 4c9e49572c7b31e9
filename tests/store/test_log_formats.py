"""Everything a log can contain is a row, a counted refusal, or a reject with a reason."""

import json
import random
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from store import log_formats
from store.digests import digest_log
from store.ids import prompt_id
from store.log_formats import NotUsed, Reject, parse_log
from store.schemas import TRAFFIC
from tests.helpers.logs import RULES, line, pair, parse, reason


def test_capture_record_becomes_a_row(tmp_path):
    (row,) = parse(tmp_path / "l", line())
    table = pa.Table.from_pylist([row], schema=TRAFFIC)
    assert {*row, "log"} == {*TRAFFIC.names, "model", "acceptance", "dropped"}
    got = table.to_pylist()[0]
    assert (got["prompt_ids"], got["output_ids"]) == ([1, 2, 3], [4, 5])
    assert got["loss_mask"] == [{"start": 3, "end": 5}]
    assert got["captured_at"] == datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert (got["domain"], got["conversation_id"], got["ids_source"]) == ("sql", "c1", "served")
    assert (got["temperature"], got["top_k"], got["consent"]) == (0.0, -1, True)
    assert got["language"] == "de"
    assert (got["prompt_tokens"], got["output_tokens"]) == (3, 2)
    assert got["prompt_id"] == prompt_id([1, 2, 3])


def test_only_our_own_format_can_say_that_an_answer_was_regenerated(tmp_path):
    (row,) = parse(tmp_path / "a", line(ids_source="regenerated"))
    assert row["ids_source"] == "regenerated"
    assert reason(tmp_path / "b", line(ids_source="reencoded")) == "bad_field:ids_source"
    assert reason(tmp_path / "c", line(ids_source=7)) == "bad_field:ids_source"
    (row,) = parse(tmp_path / "d", pair({"ids_source": "regenerated"}))
    assert row["ids_source"] == "served"


def test_missing_optional_fields_get_stated_defaults(tmp_path):
    record = {"v": 1, "prompt_ids": [1], "output_ids": [2, 3]}
    (row,) = parse(tmp_path / "l", json.dumps(record).encode())
    assert row["domain"] == "default"
    assert row["conversation_id"].startswith("prompt-")
    assert row["consent"] is row["language"] is None
    assert row["finish_reason"] is None


@pytest.mark.parametrize("finish", ["length", "abort", "tool_calls", "repetition", None])
def test_cut_answers_are_kept(tmp_path, finish):
    (row,) = parse(tmp_path / "l", line(finish_reason=finish))
    assert row["finish_reason"] == finish


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"garbage\n", "not_json"),
        (bytes(range(128, 256)) + b"\n", "not_json"),
        (b"[" * 100_000 + b"\n", "not_json"),
        (b"[1, 2]\n", "not_an_object"),
        (b'{"prompt": "hi"}\n', "unknown_format"),
        (b'{"level": "info"}\n', "unknown_format"),
        (line(v=2), "unknown_version"),
        (line(prompt_ids=None), "no_token_ids"),
        (line(prompt_ids=[]), "no_token_ids"),
        (line(output_ids=None), "no_token_ids"),
        (line(output_ids=[1, 2.0]), "bad_token_ids"),
        (line(output_ids=[1, True]), "bad_token_ids"),
        (line(output_ids="12"), "bad_token_ids"),
        (line(output_ids=[1, 100]), "token_outside_vocabulary"),
        (line(prompt_ids=[-1]), "token_outside_vocabulary"),
        (line(target_id="other"), "other_target"),
        (line(adapter="lora"), "adapter"),
        (line(output_ids=[]), "empty_loss_mask"),
        (line(output_ids=[7]), "short_output"),
        (line(finish_reason="error"), "finish_error"),
        (line(finish_reason="content_filter"), "finish_content_filter"),
        (line(finish_reason="tired"), "finish_unknown"),
        (line(finish_reason=3), "bad_field:finish_reason"),
        (line(captured_at="yesterday"), "bad_field:captured_at"),
        (line(captured_at="2026-01-02T03:04:05"), "bad_field:captured_at"),
        (line(captured_at=True), "bad_field:captured_at"),
        (line(temperature="0"), "bad_field:temperature"),
        (line(temperature=float("nan")), "bad_field:temperature"),
        (line(top_k=2**40), "bad_field:top_k"),
        (line(seed=2**70), "bad_field:seed"),
        (line(thinking="no"), "bad_field:thinking"),
        (line(shaped=["\ud800"]), "bad_field:shaped"),
        (line(request_id="\ud800"), "bad_field:request_id"),
        (b'{"request": {}, "response": {"choices": [{"index": 0}]}}\n', "no_token_ids"),
        (b'{"request": {}, "response": {"choices": []}}\n', "no_token_ids"),
        (b'{"request": {}, "response": {"error": "busy"}}\n', "finish_error"),
        (b'{"request": {}, "response": {}}\n', "unknown_format"),
        (b'{"v": 1, "domain": "a", "domain": "b"}\n', "duplicate_field"),
    ],
)
def test_rejects(tmp_path, data, expected):
    assert reason(tmp_path / "l", data) == expected


def test_cut_and_garbage_lines_carry_offset_and_bytes(tmp_path):
    good = line()
    cut = line()[:50]
    outcomes = parse(tmp_path / "l", good + b"}{\n" + b" \n\r\n" + good + cut)
    assert [type(o) for o in outcomes] == [dict, Reject, dict, Reject]
    assert (outcomes[1].offset, outcomes[1].raw, outcomes[1].reason) == (
        len(good),
        b"}{\n",
        "not_json",
    )
    assert (outcomes[3].offset, outcomes[3].raw, outcomes[3].reason) == (
        2 * len(good) + 7,
        cut,
        "cut_line",
    )


def test_last_line_without_newline_is_used_when_it_is_whole(tmp_path):
    assert len(parse(tmp_path / "l", line()[:-1])) == 1


def test_another_model_behind_a_gateway_is_not_the_target(tmp_path):
    """response.model was once not read, and half of a gateway's log was another model's."""
    data = pair({"model": "qwen3-8b"}, {"model": "qwen3-4b-fallback"})
    (outcome,) = parse(tmp_path / "l", data)
    assert (outcome.reason, outcome.detail) == (
        "other_model",
        "qwen3-4b-fallback, asked for qwen3-8b",
    )
    (row,) = parse(tmp_path / "l", pair({"model": "qwen3-8b"}, {"model": "qwen3-8b"}))
    assert row["model"] == "qwen3-8b"
    listed = replace(RULES, models=("qwen3-8b",))
    assert parse(tmp_path / "l", data, listed) == [NotUsed(0, "not_in_models", "qwen3-4b-fallback")]
    alias = pair({"model": "production"}, {"model": "qwen3-8b"})
    assert parse(tmp_path / "l", alias, listed)[0]["model"] == "qwen3-8b"


def test_a_record_with_the_targets_id_needs_no_name(tmp_path):
    rules = replace(RULES, former_ids=("t-old",))
    for name in ("t", "t-old"):
        (row,) = parse(tmp_path / "l", line(target_id=name), rules)
        assert (row["target_id"], row["model"]) == ("t", None)
    (outcome,) = parse(tmp_path / "l", line(target_id="x"), rules)
    assert (outcome.reason, outcome.detail) == ("other_target", "x")


def test_our_own_captures_are_used_whatever_models_are_listed(tmp_path):
    """ingest.models once dropped records with the target's own id."""
    listed = replace(RULES, models=("qwen3-8b",))
    (row,) = parse(tmp_path / "l", line(target_id="t", model="alias"), listed)
    assert row["model"] is None
    assert parse(tmp_path / "l", line(model="x"), listed) == [NotUsed(0, "not_in_models", "x")]


def test_a_name_of_the_client_is_detail_and_no_reason(tmp_path):
    """Its raw characters were once in the reason, and a lone surrogate cannot be written."""
    doubled = b'{"v":1,"\\ud800\\n%s":1,"\\ud800\\n%s":2}\n' % (b"x" * 999, b"x" * 999)
    (outcome,) = parse(tmp_path / "l", doubled)
    assert (outcome.reason, len(outcome.detail)) == ("duplicate_field", 103)
    assert outcome.detail.startswith("\\ud800\\nxxx")
    (outcome,) = parse(tmp_path / "l", line(adapter={"\ud800": 1}))
    outcome.detail.encode()


def test_labels_are_in_one_form(tmp_path):
    """A domain name in two Unicode forms once made two splits and two slices."""
    composed, split = "b\u00fcro", "bu\u0308ro"
    rows = parse(tmp_path / "l", line(domain=composed) + line(domain=f" {split} "))
    assert [row["domain"] for row in rows] == [composed, composed]


@pytest.mark.parametrize(
    ("label", "expected"),
    [(1234, "1234"), (True, "True"), (["a"], None), ({"a": 1}, None), ("\ud800", "\ufffd")],
)
def test_a_label_that_is_no_text_refuses_nothing(tmp_path, label, expected):
    """`"conversation_id": 1234` once counted as damage, and 5 % of such records stopped ingest."""
    for data in (line(tenant=label), pair({"metadata": {"tenant": label}})):
        (row,) = parse(tmp_path / "l", data)
        assert row["tenant"] == expected
    (row,) = parse(tmp_path / "l", pair({"metadata": {"conversation_id": label}}))
    assert row["conversation_id"] == (expected or row["conversation_id"])


def test_a_conversation_has_one_label_under_both_of_its_names(tmp_path):
    """The capture once read metadata.conversation, but ingest metadata.conversation_id."""
    for name in ("conversation", "conversation_id"):
        (row,) = parse(tmp_path / "l", pair({"metadata": {name: " c\n1 "}}))
        assert row["conversation_id"] == "c\ufffd1"
    long = [parse(tmp_path / "l", line(domain="x" * 999 + end))[0]["domain"] for end in "ab"]
    assert [len(one) for one in {*long}] == [200, 200]


@pytest.mark.parametrize("label", ["None", "null", " ", "", "undefined"])
def test_labels_that_say_nothing_are_none(tmp_path, label):
    (row,) = parse(tmp_path / "l", line(conversation_id=label))
    assert row["conversation_id"].startswith("prompt-")


def test_a_torn_line_does_not_swallow_the_next_record(tmp_path):
    """A full disk leaves half a record, and the next one follows on the same line."""
    torn = line()[:70]
    outcomes = parse(tmp_path / "l", line() + torn + line(request_id="r2") + line())
    assert [type(o) for o in outcomes] == [dict, Reject, dict, dict]
    at = len(line())
    assert (outcomes[1].offset, outcomes[1].reason, outcomes[1].raw) == (at, "torn_line", torn)
    assert outcomes[2]["request_id"] == "r2"
    zeros = parse(tmp_path / "l", b"\0" * 4096 + line())
    assert [type(o) for o in zeros] == [Reject, dict]


def test_a_byte_order_mark_is_no_damage(tmp_path):
    outcomes = parse(tmp_path / "l", b"\xef\xbb\xbf" + line() + b"}{\n")
    assert [type(o) for o in outcomes] == [dict, Reject]
    assert outcomes[1].offset == 3 + len(line())


def test_overlong_line_is_rejected_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(log_formats, "MAX_LINE_BYTES", 1000)
    long = line(model="m" * 5000)
    outcomes = parse(tmp_path / "l", long + line())
    assert [type(o) for o in outcomes] == [Reject, dict]
    assert (outcomes[0].reason, outcomes[0].raw) == ("line_too_long", b"")  # its consent is unread


def test_openai_pair_with_two_choices(tmp_path):
    both = {
        "request": {
            "temperature": 0.7,
            "seed": 3,
            "metadata": {"domain": "chat", "conversation_id": "c9"},
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "response": {
            "id": "chatcmpl-1",
            "created": 1767323045,
            "prompt_token_ids": [1, 2],
            "choices": [
                {"index": 0, "finish_reason": "stop", "token_ids": [3, 4]},
                {"index": 1, "finish_reason": "length", "token_ids": [5]},
            ],
        },
    }
    row, reject = parse(tmp_path / "l", json.dumps(both).encode())
    assert (row["source"], row["domain"], row["seed"], row["thinking"]) == (
        "openai",
        "chat",
        3,
        False,
    )
    assert row["captured_at"] == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert reject.reason == "short_output"


def test_completions_pair_carries_prompt_ids_in_the_choice(tmp_path):
    choice = {"finish_reason": "stop", "token_ids": [3, 4], "prompt_token_ids": [1]}
    data = {"request": {}, "response": {"choices": [choice]}}
    (row,) = parse(tmp_path / "l", json.dumps(data).encode())
    assert list(row["prompt_ids"]) == [1]


def test_any_bytes_give_outcomes_that_account_for_every_record(tmp_path):
    """1,000 lines, some damaged at random: no exception, one outcome per line that is not blank."""
    rng = random.Random(0)
    lines = []
    for _ in range(1000):
        data = bytearray(line()[:-1])
        for _ in range(rng.choice([0, 0, 1, 3])):
            data[rng.randrange(len(data))] = rng.choice([0, 34, 91, 125, 200, 255, 44, 57])
        lines.append(bytes(data))
    outcomes = parse(tmp_path / "l", b"\n".join(lines))
    assert len(outcomes) == 1000
    rows = [o for o in outcomes if isinstance(o, dict)]
    assert 300 < len(rows) < 1000
    pa.Table.from_pylist(rows, schema=TRAFFIC)


def test_log_that_changes_while_read_is_refused(tmp_path):
    path = tmp_path / "l"
    path.write_bytes(line())
    size, digest, _ = digest_log(str(path), set())
    path.write_bytes(line(domain="sqx"))
    with pytest.raises(ValueError, match="changed while it was read"):
        list(parse_log(path, size, digest, RULES))


def test_appending_after_the_digest_does_not_matter(tmp_path):
    path = tmp_path / "l"
    path.write_bytes(line())
    size, digest, _ = digest_log(str(path), set())
    with open(path, "ab") as stream:
        stream.write(line())
    assert len(list(parse_log(path, size, digest, RULES))) == 1
