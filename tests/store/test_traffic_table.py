"""One row per sample, and each text on one side of the split, whatever logs say in any order."""

import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from store.groups import beginnings
from store.ids import prompt_conversation, sample_id, split_of
from store.leakage import leaking
from store.place import place_of
from store.schemas import TRAFFIC
from store.tables import Table
from store.traffic_table import prompts_of, tokens_of
from tests.helpers.tables import regrouped

START = datetime(2026, 1, 1, tzinfo=UTC)


def row(sample, second=0, repeats=1, split="train"):
    return dict.fromkeys(TRAFFIC.names) | {
        "sample_id": sample,
        "captured_at": START + timedelta(seconds=second),
        "conversation_id": f"c{second}",
        "repeat_count": repeats,
        "split": split,
        "target_id": "t",
        "output_ids": [1],
        "loss_mask": [{"start": 0, "end": 1}],
    }


def test_repeats_are_merged_and_the_earliest_row_stays():
    rows = [row("x", 5, 2, "test"), row("y", 1), row("x", 3, 4, "train")]
    table = read(rows)
    assert table.schema == TRAFFIC
    assert table["sample_id"].to_pylist() == ["x", "y"]
    assert table["repeat_count"].to_pylist() == [6, 1]
    assert table["conversation_id"].to_pylist() == ["c3", "c1"]
    assert table["split"].to_pylist() == ["train", "train"]
    assert read([]).schema == TRAFFIC


def test_tokens_are_those_of_the_named_samples_once_each(work_url):
    table = Table(place_of(work_url) / "traffic", TRAFFIC)
    for rows in ([row("x", 5), row("y", 100)], [row("x", 3), row("z", 200)]):
        table.append(pa.Table.from_pylist(rows, schema=TRAFFIC))

    def found(names, **bounds):
        batches = tokens_of(table, names, ["output_ids"], **bounds)
        rows = [row for batch in batches for row in batch.to_pylist()]
        return sorted((row["sample_id"], row["output_ids"]) for row in rows)

    assert found(["x", "z", "absent"]) == [("x", [1]), ("z", [1])]
    assert found([]) == []
    late = START + timedelta(seconds=50)
    assert found(["x", "y", "z"], since=late) == [("y", [1]), ("z", [1])]
    assert found(["x", "y", "z"], until=late) == [("x", [1])]


def test_prompts_are_read_once_per_sample_in_a_version(work_url):
    table = Table(place_of(work_url) / "traffic", TRAFFIC)
    rows = [row("x", 5), row("y", 100), row("x", 300)]
    for one, ids in zip(rows, ([1, 2], [3, 4], [1, 2]), strict=True):
        one["prompt_ids"] = ids
    for one in rows:
        table.append(pa.Table.from_pylist([one], schema=TRAFFIC))
    wanted = {"x": b"\1\0\0\0\2\0\0\0", "y": b"\3\0\0\0\4\0\0\0"}
    read = table.read(["sample_id", "captured_at"])
    assert prompts_of(table, read) == wanted
    assert set(prompts_of(table, read, version=1)) == {"x"}
    assert prompts_of(table, read.slice(0, 0)) == {}
    table.append(pa.Table.from_pylist([row("z", 1) | {"captured_at": None}], schema=TRAFFIC))
    assert set(prompts_of(table, table.read(["sample_id", "captured_at"]))) == {"x", "y", "z"}


def test_a_side_of_an_earlier_selection_stays_unless_training_needs_it():
    rows = [sample([*range(10, 15 + i)], second=i) for i in range(3)]  # one group: prefixes
    alone = sides(read(rows))
    [side] = set(alone.values())
    first = str(rows[0]["sample_id"])
    for earlier in ("train", "val", "test"):
        table = read(rows, {first: earlier})
        nearer = min(side, earlier, key=["train", "val", "test"].index)
        assert set(sides(table).values()) == {nearer}


# A chat template as token ids: 1 opens a turn, 2 ends it, 3 is a newline, 5 user, 6 assistant.
SYSTEM = [1, 4, *range(100, 160), 2, 3]
OPEN = [1, 6, 3]


def turns(*texts, answers=(), opening=()):
    """The prompt of the last of these user turns; the history is sent again."""
    ids = [*SYSTEM]
    for text, answer in zip(texts, [*answers, None], strict=True):
        ids += [1, 5, 3, *text, 2, 3, *OPEN]
        ids += opening if answer is None else [*answer, 2, 3]
    return ids


def sample(prompt, output=(7, 8), label=None, second=0, **more):
    """A TRAFFIC row as ingest writes it, with 20 % for val and for test."""
    by_prompt = prompt_conversation(prompt)
    return dict.fromkeys(TRAFFIC.names) | {
        "sample_id": sample_id("t", prompt, list(output)),
        "captured_at": START + timedelta(seconds=second),
        "conversation_id": label or by_prompt,
        "split": split_of(label or by_prompt, 20, 20),
        "split_by_prompt": split_of(by_prompt, 20, 20),
        "repeat_count": 1,
        "target_id": "t",
        "domain": "default",
        "prompt_ids": prompt,
        "output_ids": list(output),
        **more,
    }


def read(rows, earlier=None):
    return regrouped(pa.Table.from_pylist(rows, schema=TRAFFIC), earlier)


def sides(table):
    return dict(zip(table["sample_id"].to_pylist(), table["split"].to_pylist(), strict=True))


def of_split(table, *names):
    return table.filter(pa.array([split in names for split in table["split"].to_pylist()]))


def chats(count, length=3, opening=(), label=lambda i: None, rng=None):
    """Chats of so many turns under one long system prompt, each turn a sample."""
    rng = rng or random.Random(0)
    rows = []
    for i in range(count):
        texts = [[rng.randrange(200, 900) for _ in range(rng.randint(1, 9))] for _ in range(length)]
        texts[0] += [1000 + i]
        answers = [[rng.randrange(200, 900) for _ in range(5)] for _ in range(length)]
        for n in range(length):
            prompt = turns(*texts[: n + 1], answers=answers[:n], opening=opening)
            rows.append(sample(prompt, answers[n], label(i), second=10 * i + n))
    return rows


@pytest.mark.parametrize("opening", [(), (31, 33, 32, 33)], ids=["plain", "thinking"])
@pytest.mark.parametrize("label", [None, "None", "service"])
def test_turns_of_one_chat_are_on_one_side_without_labels(opening, label):
    """Without useful labels, 26 of 26 test samples once had another turn of their chat in training.

    Templates that open an answer with an empty thought do not repeat it in later turns.
    """
    rows = chats(200, opening=opening, label=lambda i: label)
    table = read(rows)
    found = sides(table)
    for i in range(0, len(rows), 3):
        assert len({found[r["sample_id"]] for r in rows[i : i + 3]}) == 1
    counts = Counter(found.values())
    assert 0.1 * 600 < counts["test"] < 0.3 * 600, "the shares stay"
    assert len(set(table["conversation_id"].to_pylist())) == 200
    assert not leaking(of_split(table, "train"), of_split(table, "test", "val"))


def test_a_template_joins_nothing():
    """Prompts that differ only in a few tokens at their end are still different conversations."""
    rows = [sample(turns([300 + i]), second=i) for i in range(300)]
    rows += [sample(turns([300 + i, 400 + i]), second=i) for i in range(300)]  # "hi", "hi there"
    assert len(set(read(rows)["conversation_id"].to_pylist())) == 600


def test_equal_prompts_of_different_users_are_on_one_side():
    rows = [sample(turns([300 + i % 100]), [i], label=f"user-{i}", second=i) for i in range(500)]
    table = read(rows)
    found = sides(table)
    for i in range(100):
        assert len({found[r["sample_id"]] for r in rows[i::100]}) == 1
    assert 0.1 * 500 < Counter(found.values())["test"] < 0.3 * 500, "the shares stay"
    assert set(table["conversation_id"].to_pylist()) == {f"user-{i}" for i in range(500)}


def test_a_label_joins_what_shares_no_beginning():
    rows = [sample(turns([300 + i]), label=f"c{i // 5}", second=i) for i in range(300)]
    found = sides(read(rows))
    for i in range(0, 300, 5):
        assert {found[r["sample_id"]] for r in rows[i : i + 5]} == {split_of(f"c{i // 5}", 20, 20)}


def test_a_second_log_without_labels_takes_nothing_away():
    """The row captured first once won, and its missing label moved the sample to another split."""
    named = chats(60, label=lambda i: f"chat-{i}")
    for r in named:
        r |= {"domain": "tickets", "language": "de"}
    bare = [
        r | {"captured_at": START - timedelta(days=1), "request_id": "a", "domain": "default"}
        for r in chats(60)
    ]
    before, after = read(named), read(bare + named)
    for name in ("conversation_id", "split", "domain", "language"):
        assert after[name].to_pylist() == before[name].to_pylist()
    assert set(after["repeat_count"].to_pylist()) == {2}


def test_splits_do_not_depend_on_the_order_of_logs():
    rows = [*chats(80), *chats(40, label=lambda i: f"chat-{i}", rng=random.Random(1))]
    expected = read(rows)
    random.Random(3).shuffle(rows)
    assert read(rows).equals(expected)


def test_splits_do_not_move_when_traffic_arrives_and_never_out_of_training():
    rows = sorted(chats(150, length=4), key=lambda r: r["captured_at"])
    before = {}
    for count in (100, 300, 600):
        found = sides(read(rows[:count]))
        assert before.items() <= found.items()
        before = found
    # A prompt that two chats begin with, captured late, joins them: training wins.
    first, second = turns([500]), turns([501])
    rows = [
        sample(turns([500], [9], answers=[[1]]), label="a", second=0),
        sample(turns([501], [9], answers=[[1]]), label="b", second=1),
        sample(first, label="s", second=2),
        sample(second, label="s", second=3),
    ]
    for r, split in zip(rows, ("test", "train", "val", "val"), strict=True):
        r["split"] = split
    assert sorted(sides(read(rows[:2])).values()) == ["test", "train"]
    assert set(sides(read(rows)).values()) == {"train"}


def test_a_group_that_would_be_the_whole_held_out_set_is_training():
    rows = [sample(turns([1000 + i]), second=i) for i in range(300)]
    greeting = [sample(turns([300]), [i], second=1000 + i) for i in range(100)]
    for r in greeting:
        r["split_by_prompt"] = "test"
    found = sides(read(rows + greeting))
    assert {found[r["sample_id"]] for r in greeting} == {"train"}
    found = sides(read(rows + greeting[:20]))
    assert {found[r["sample_id"]] for r in greeting[:20]} == {"test"}


def test_the_ending_of_a_template_is_learned_not_guessed():
    prompts = [np.array(turns([300 + i]), "<i4").tobytes() for i in range(50)]
    assert [len(p) - len(b) for p, b in zip(prompts, beginnings(prompts), strict=True)] == [16] * 50
    raw = [np.array([i, i + 1, i + 2, i + 3, i + 4], "<i4").tobytes() for i in range(50)]
    assert beginnings(raw) == raw


def table_of(*prompts):
    return pa.Table.from_pylist([sample(p, [i]) for i, p in enumerate(prompts)], schema=TRAFFIC)


def test_leaking_names_what_training_knows():
    a, b, c, d = [[n, *range(10, 20)] for n in range(4)]
    train = table_of(a, [*b, 50, 51])
    held_out = table_of(a, [*a, 60], b, c, d[:2], [a[0]])
    names = held_out["sample_id"].to_pylist()
    assert leaking(train, held_out) == set(names[:3])
    assert leaking(train, held_out.slice(0, 0)) == set()
    assert leaking(train.slice(0, 0), held_out) == set()
