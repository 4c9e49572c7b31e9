"""The writer while its file system fails: no partial record, everything counted, few messages."""

import collections
import json
import logging
import resource
import shutil

import pytest

from serving.capture_writer import Exchange, Writer

BODY = json.dumps(
    {
        "id": "r",
        "prompt_token_ids": list(range(60)),
        "choices": [{"index": 0, "finish_reason": "stop", "token_ids": list(range(90))}],
    }
).encode()


def answered():
    return Exchange(record={"v": 1, "stream": False}, chunks=[BODY], complete=True)


@pytest.fixture
def counts():
    return collections.Counter()


@pytest.fixture
def writer(tmp_path, counts):
    """A writer into a new folder; send() waits until every record is written or counted as lost."""
    started = Writer(tmp_path / "log" / "log.jsonl", lambda outcome, n: counts.update({outcome: n}))
    yield started
    started.close()


def send(writer, number):
    for _ in range(number):
        writer.put(answered(), len(BODY))
    while writer._bytes:
        pass


@pytest.fixture
def full_disk():
    """Limit the size of files: as on a full disk, a write then takes a part and fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("truncates", [True, False])
def test_a_line_torn_by_a_full_disk_does_not_swallow_the_next(
    writer, counts, full_disk, truncates, monkeypatch
):
    send(writer, 1)
    size = writer.path.stat().st_size
    if not truncates:  # some file systems refuse even that when they are full

        def refuse(*_):
            raise OSError("no room to truncate")

        monkeypatch.setattr("serving.capture_writer._cut", refuse)
    full_disk(4 * size + size // 2)  # room for three and a half more
    send(writer, 10)
    assert (counts["written"], counts["not_written"]) == (4, 7)
    full_disk(resource.RLIM_INFINITY)
    send(writer, 2)
    lines = [line for line in writer.path.read_bytes().split(b"\n") if line]
    assert counts["written"] == 6
    whole = [line for line in lines if line.endswith(b"}")]
    assert len(whole) == 6
    assert all(json.loads(line)["output_ids"] == list(range(90)) for line in whole)
    assert (len(lines) == 6) is truncates


def test_a_folder_removed_while_capturing_comes_back(writer, counts):
    send(writer, 1)
    shutil.rmtree(writer.path.parent)
    send(writer, 2)
    assert len(writer.path.read_bytes().splitlines()) == 2
    assert dict(+counts) == {"written": 3}


def test_a_folder_that_cannot_be_written_costs_one_log_line_a_minute(
    writer, counts, tmp_path, caplog
):
    (tmp_path / "log").write_text("a file where the folder was")
    with caplog.at_level(logging.WARNING, "vllm.flywheel.capture"):
        send(writer, 50)
    assert dict(+counts) == {"not_written": 50}
    assert len(caplog.records) == 1
    (tmp_path / "log").unlink()
    send(writer, 1)
    assert counts["written"] == 1
