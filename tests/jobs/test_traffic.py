"""The demo's clients: what was captured is not sent again, whatever else is in the files."""

import json

from jobs.traffic import captured


def test_a_line_that_is_no_record_does_not_stop_the_demo(tmp_path):
    """The line `123` once raised a TypeError."""
    lines = ["123", "null", "[1]", '{"conversation_id": ["c"]}', '{"conversation_id"', "[" * 9999]
    record = json.dumps({"conversation_id": "c1"})
    (tmp_path / "a.jsonl").write_bytes("\n".join([*lines, record]).encode() + b"\n\xff\n")
    assert captured(tmp_path) == {"c1"}
