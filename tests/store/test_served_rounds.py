"""A captured record gives a row of acceptance/ where its rounds are known and are its own."""

import json

import pyarrow as pa
import pytest

from store.log_formats import Reject
from store.schemas import ACCEPTANCE
from store.served_rounds import are_of
from tests.helpers.logs import line, parse

SHA = "0123456789ab" * 5 + "cdef"
ROUNDS = {
    "output_ids": [4, 5, 6, 7, 8],
    "accepted": [2, 0],
    "drafted": [7, 3],
    "drafter": "7",
    "drafter_sha256": SHA,
    "replica": "east-1",
    "k": 7,
    "started_at": 1764547200.5,
    "finished_at": 1764547202.0,
    "concurrency": 12,
    "choice": 0,
    "request_id": "chatcmpl-9",
}


def test_a_record_with_rounds_gives_one_row(tmp_path):
    (row,) = parse(tmp_path / "l", line(**ROUNDS))
    found = row["acceptance"]
    assert ACCEPTANCE.names == [
        *(name for name in ACCEPTANCE.names if name in found or name in ("batch", "log"))
    ]
    [made] = pa.Table.from_pylist([found], schema=ACCEPTANCE).to_pylist()
    assert made["sample_id"] == row["sample_id"]
    assert (made["drafter_version"], made["version"]) == (SHA[:12], "7")
    assert (made["accepted"], made["drafted"], made["k"]) == ([2, 0], [7, 3], 7)
    assert (made["replica"], made["concurrency"], made["domain"]) == ("east-1", 12, "sql")
    assert (made["prompt_tokens"], made["output_tokens"]) == (3, 5)
    assert (made["finished_at"] - made["started_at"]).total_seconds() == 1.5
    assert made["request_id"] == "chatcmpl-9"


def test_choices_of_one_answer_have_names_of_their_own(tmp_path):
    (row,) = parse(tmp_path / "l", line(**ROUNDS | {"choice": 2}))
    assert row["acceptance"]["request_id"] == "chatcmpl-9/2"


@pytest.mark.parametrize(
    "changes",
    [
        {"accepted": None, "drafted": None},
        {"drafter": None, "drafter_sha256": None},
        {"drafter": "", "drafter_sha256": ""},
        {"accepted": [], "drafted": []},
        {"drafted": None},
    ],
)
def test_a_sample_without_rounds_is_a_sample(tmp_path, changes):
    (row,) = parse(tmp_path / "l", line(**ROUNDS | changes))
    assert row["acceptance"] is None
    assert row["output_tokens"] == 5


def test_a_record_of_an_earlier_release_is_read_as_before(tmp_path):
    (row,) = parse(tmp_path / "l", line(drafter="v1", spec={"per_step_accepted": [1]}))
    assert row["acceptance"] is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"accepted": [2, 1]}, "accepted"),
        ({"accepted": [2]}, "accepted"),
        ({"drafted": [1, 3]}, "accepted"),
        ({"drafted": [7, 2**15]}, "accepted"),
        ({"accepted": [3, -1]}, "accepted"),
        ({"accepted": "20"}, "accepted"),
        ({"accepted": [True, 1]}, "accepted"),
        ({"drafted": [7.0, 3]}, "drafted"),
        ({"drafter_sha256": "../../etc/passwd"}, "drafter_sha256"),
        ({"drafter_sha256": 7}, "drafter_sha256"),
        ({"concurrency": 2**40}, "concurrency"),
        ({"started_at": "soon"}, "started_at"),
        ({"replica": ["east"]}, "replica"),
    ],
)
def test_rounds_that_cannot_be_of_this_answer_are_refused_with_it(tmp_path, changes, field):
    (found,) = parse(tmp_path / "l", line(**ROUNDS | changes))
    assert isinstance(found, Reject)
    assert found.reason == f"bad_field:{field}"


def test_without_consent_there_is_no_row(tmp_path):
    (found,) = parse(tmp_path / "l", line(**ROUNDS | {"consent": False}))
    assert not isinstance(found, dict)


def test_other_answers_of_the_same_log_stay(tmp_path):
    bad = line(**ROUNDS | {"accepted": [9, 9]})
    found = parse(tmp_path / "l", bad + line(**ROUNDS))
    assert [isinstance(one, Reject) for one in found] == [True, False]


def test_rounds_of_an_answer_of_a_hundred_thousand_tokens():
    accepted = [9] * 10_000
    assert are_of(accepted, [15] * 10_000, 100_001)
    assert not are_of(accepted, [15] * 10_000, 100_000)
    assert json.loads(json.dumps(accepted)) == accepted
