"""Everything a log can contain is a row, a counted refusal, or a reject with a reason."""

import gzip
import hashlib
import json
import random
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from store import logs
from store.logs import REASONS, NoConsent, Reject, Rules, digest_log, parse_log
from store.schemas import TRAFFIC

RULES = Rules(
    target_id="t",
    vocab_size=100,
    default_domain="default",
    min_output_tokens=2,
    val_percent=10,
    test_percent=10,
)
CAPTURE = {
    "v": 1,
    "captured_at": "2026-01-02T03:04:05.678901Z",
    "request_id": "r1",
    "endpoint": "/v1/chat/completions",
    "model": "m",
    "choice": 0,
    "prompt_ids": [1, 2, 3],
    "output_ids": [4, 5],
    "finish_reason": "stop",
    "temperature": 0,
    "top_k": -1,
    "conversation_id": "c1",
    "domain": "sql",
    "consent": True,
    "language": "de",
}


def line(**changes):
    return json.dumps(CAPTURE | changes).encode() + b"\n"


def parse(path, data, rules=RULES) -> list[Any]:
    path.write_bytes(data)
    return list(parse_log(path, len(data), hashlib.sha256(data).hexdigest(), rules))


def reason(path, data):
    (outcome,) = parse(path, data)
    assert isinstance(outcome, Reject), outcome
    assert outcome.reason.partition(":")[0] in REASONS
    assert outcome.raw == data[: logs.MAX_REJECT_BYTES]
    return outcome.reason


def test_capture_record_becomes_a_row(tmp_path):
    (row,) = parse(tmp_path / "l", line())
    table = pa.Table.from_pylist([row], schema=TRAFFIC)
    assert set(row) == set(TRAFFIC.names)
    got = table.to_pylist()[0]
    assert (got["prompt_ids"], got["output_ids"]) == ([1, 2, 3], [4, 5])
    assert got["loss_mask"] == [{"start": 3, "end": 5}]
    assert got["captured_at"] == datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert (got["domain"], got["conversation_id"], got["ids_source"]) == ("sql", "c1", "served")
    assert (got["temperature"], got["top_k"], got["consent"]) == (0.0, -1, True)
    assert got["language"] == "de"


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
        (b'{"prompt": "hi", "completion": "ho"}\n', "unknown_format"),
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
        (line(domain=["a"]), "bad_field:domain"),
        (line(request_id="\ud800"), "bad_field:request_id"),
        (b'{"request": {}, "response": {"choices": [{"index": 0}]}}\n', "no_token_ids"),
        (b'{"request": {}, "response": {"choices": []}}\n', "no_token_ids"),
        (b'{"request": {}, "response": {"error": "busy"}}\n', "unknown_format"),
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


@pytest.mark.parametrize("consent", [False, "false", 0, "maybe", [], "no"])
def test_no_consent_is_counted_and_never_kept(tmp_path, consent):
    assert parse(tmp_path / "l", line(consent=consent, finish_reason="error")) == [NoConsent(0)]


@pytest.mark.parametrize("consent", [True, "true", "1", "yes", "True"])
def test_consent(tmp_path, consent):
    (row,) = parse(tmp_path / "l", line(consent=consent))
    assert row["consent"] is True


def test_overlong_line_is_rejected_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_LINE_BYTES", 1000)
    long = line(model="m" * 5000)
    outcomes = parse(tmp_path / "l", long + line())
    assert [type(o) for o in outcomes] == [Reject, dict]
    assert (outcomes[0].reason, outcomes[0].raw) == ("line_too_long", long[:1000])


def test_openai_pair_with_two_choices(tmp_path):
    pair = {
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
    row, reject = parse(tmp_path / "l", json.dumps(pair).encode())
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
    pair = {"request": {}, "response": {"choices": [choice]}}
    (row,) = parse(tmp_path / "l", json.dumps(pair).encode())
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


def test_compressed_log_is_all_rejects(tmp_path):
    outcomes = parse(tmp_path / "l", gzip.compress(line() * 100))
    assert outcomes
    assert all(isinstance(o, Reject) for o in outcomes)


def test_log_that_changes_while_read_is_refused(tmp_path):
    path = tmp_path / "l"
    path.write_bytes(line())
    size, digest, _ = digest_log(path, set())
    path.write_bytes(line(domain="sqx"))
    with pytest.raises(ValueError, match="changed while it was read"):
        list(parse_log(path, size, digest, RULES))


def test_appending_after_the_digest_does_not_matter(tmp_path):
    path = tmp_path / "l"
    path.write_bytes(line())
    size, digest, _ = digest_log(path, set())
    with open(path, "ab") as stream:
        stream.write(line())
    assert len(list(parse_log(path, size, digest, RULES))) == 1


def test_digest_knows_its_prefixes(tmp_path):
    data = b"a" * 3_000_000
    (tmp_path / "l").write_bytes(data)
    size, digest, prefixes = digest_log(tmp_path / "l", {0, 7, 2_500_000, 9_000_000})
    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert set(prefixes) == {0, 7, 2_500_000, len(data)}
    assert prefixes[2_500_000] == hashlib.sha256(data[:2_500_000]).hexdigest()
