"""Logs as they are found: rotated, compressed, truncated, with a byte order mark, or not logs."""

import gzip
import json
import os
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from store import log_files
from store.digests import Digests, digest_log
from store.log_files import container, find_logs, on_disk, open_log, other_kind, stamp
from store.log_formats import Reject, Rules, parse_log
from store.place import Place, place_of

RULES = Rules("t", 100, "default", 2, 10, 10)


def line(i: int) -> bytes:
    return b'{"v": 1, "request_id": "r%d", "prompt_ids": [1, 2], "output_ids": [%d, 4]}\n' % (i, i)


LINES = b"".join(line(i) for i in range(50))


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def parse(path) -> list[Any]:
    size, sha256, _ = digest_log(str(path), set())
    return list(parse_log(path, size, sha256, RULES))


PACKED = [
    gzip.compress(LINES, mtime=0),
    zstd(LINES),
    gzip.compress(LINES[:99], mtime=0) + gzip.compress(LINES[99:], mtime=0),
]


@pytest.mark.parametrize("data", [*PACKED, PACKED[0] + b"\0" * 512])
def test_compressed_logs_are_read_whatever_their_name(tmp_path, data):
    (tmp_path / "capture.jsonl.1").write_bytes(data)
    (tmp_path / "plain").write_bytes(LINES)
    rows = parse(tmp_path / "capture.jsonl.1")
    assert [row["request_id"] for row in rows] == [f"r{i}" for i in range(50)]
    # compressing a log makes no new log of it
    packed, plain = (digest_log(f"{tmp_path}/{name}", {9}) for name in ("capture.jsonl.1", "plain"))
    assert packed == plain


@pytest.mark.parametrize("level", [0, 6])
def test_a_torn_gzip_gives_the_records_before_the_tear_and_one_reject(tmp_path, level):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(LINES, level, mtime=0)[:-60])
    *rows, reject = parse(path)
    assert [row["request_id"] for row in rows] == [f"r{i}" for i in range(len(rows))]
    assert rows
    assert (reject.reason, reject.raw) == ("damaged_file", b"")
    assert "ends inside a gzip member" in reject.detail


def test_what_follows_a_gzip_file_is_one_reject(tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(LINES, mtime=0) + b"tr")
    *rows, reject = parse(path)
    assert len(rows) == 50
    assert (type(reject), reject.offset, reject.reason) == (Reject, len(LINES), "damaged_file")


def test_a_large_compressed_log_is_read_in_pieces(tmp_path):
    data = os.urandom(3 << 20)
    (tmp_path / "log").write_bytes(gzip.compress(data, 0, mtime=0))
    with open_log(tmp_path / "log") as stream:
        assert zlib.crc32(stream.read()) == zlib.crc32(data)


def test_rotated_logs_of_a_folder_are_found_and_the_rest_is_named(tmp_path):
    """Rotated and compressed logs were once missed silently."""
    names = ["capture.jsonl", "capture.jsonl.1", "capture.jsonl-20261129.gz", "b.jsonl.zst"]
    others = ["README.md", "sub/", "x.jsonl.gz.tmp", "y.txt"]
    for name in [*names, *others, ".hidden.jsonl"]:
        path = tmp_path / name
        path.mkdir() if name.endswith("/") else path.write_bytes(LINES)
    logs, aside = find_logs([str(tmp_path)])
    assert logs == {f"{tmp_path}/{name}": stamp(tmp_path / name) for name in sorted(names)}
    assert aside == {str(tmp_path): others}
    assert [*find_logs([f"{tmp_path}/capture*"])[0]] == sorted(f"{tmp_path}/{n}" for n in names[:3])


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'[{"id": 1}]\n' + LINES, None),
        (b"PAR1....", "Parquet"),
        (b"\xff\xfe{\0", "UTF-16"),
        (b"INFO 11-30 12:00:00 [logger.py:39] Received request chat-1: prompt: 'a'\n", "server"),
        (LINES, None),
        (b"[1, 2\n" + LINES, None),
        (b'[{"torn": \n' + LINES, None),
        (b"", None),
        (b"garbage", None),
    ],
)
def test_files_that_are_no_logs_say_what_they_are(tmp_path, data, kind):
    (tmp_path / "file").write_bytes(data)
    found = other_kind(tmp_path / "file")
    assert found is None if kind is None else kind in str(found)
    assert container(tmp_path / "file") == "lines"


@pytest.mark.parametrize(
    "data",
    [
        b'[\n  {\n    "id": "a",\n    "conversations": [{"from": "hu',
        b'[{"id": 1},\n{"id": 2}]',
        b'[{"request": {}, "response": {"prompt_token_ids": [1]}}]',
        b"[\n" + LINES.strip().replace(b"\n", b",\n") + b"\n]\n",
        b"[" + LINES.strip().replace(b"\n", b"\n,") + b"]",
        b'{\n "request": {}\n}',
        gzip.compress(b'[\n {"messages": []}', mtime=0),
    ],
)
def test_arrays_are_read_by_their_elements(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    assert (other_kind(tmp_path / "file"), container(tmp_path / "file")) == (None, "elements")


SERVED = b"INFO 11-30 12:00:00 [logger.py:39] Received request chat-1: prompt: 'a'\n"


@pytest.mark.parametrize("lines", [1, 20_000])
def test_one_line_of_the_server_in_a_log_does_not_hide_its_records(tmp_path, lines):
    """Such a line once made fifty good records "the server's own text log"."""
    (tmp_path / "log").write_bytes(SERVED * lines + LINES)
    assert other_kind(tmp_path / "log") is None
    (tmp_path / "log").write_bytes(SERVED * lines + b'{"level": "info"}\n')
    assert other_kind(tmp_path / "log") == "the server's own text log"


def test_a_cut_zstd_log_gives_all_but_its_last_piece(tmp_path):
    """A log of 400 kB once gave nothing, and a larger one lost its last MiB.

    Lost are the block that is cut (128 KiB) and less than one piece before it.
    """
    random = os.urandom(1 << 17).hex().encode()
    lines = b"".join(
        b'{"v": 1, "x": "%s", "request_id": "r%d", "prompt_ids": [1], "output_ids": [3, 4]}\n'
        % (random[i * 128 :][:128], i)
        for i in range(2000)
    )
    path = tmp_path / "log.zst"
    path.write_bytes(zstd(lines)[:-100])
    *rows, reject = parse(path)
    assert len(lines) * (1 - len(rows) / 2000) < (128 << 10) + log_files.PIECE
    assert reject.reason == "damaged_file"


def test_a_glob_of_folders_finds_their_logs(tmp_path):
    """It was once refused as "no such file, folder or glob"."""
    for name in ("a", "b"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "c.jsonl").write_bytes(LINES)
    assert len(find_logs([f"{tmp_path}/logs/*"])[0]) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \*\.jsonl.* file in"):
        find_logs([f"{tmp_path}/emp*"])


def test_a_parquet_file_says_what_it_is(tmp_path):
    pq.write_table(pa.table({"messages": ["hi"]}), tmp_path / "file")
    assert (other_kind(tmp_path / "file"), container(tmp_path / "file")) == (None, "parquet")
    pq.write_table(pa.table({"x": ["hi"]}), tmp_path / "file")
    assert "a Parquet file" in str(other_kind(tmp_path / "file"))


def test_digest_of_an_unchanged_log_is_kept(tmp_path):
    place, file = Place(str(tmp_path)), tmp_path / "logs.json"
    path = tmp_path / "log"
    path.write_bytes(LINES)
    log, young = str(path), stamp(path)
    digest = digest_log(log, {7})
    Digests(place).keep({log: (young, digest)})
    assert Digests(place).get(log, young) is None  # a second write may leave the times alone
    old = [len(LINES), 1, 1, young[3]]
    Digests(place).keep({log: (old, digest), "s3://b/log": ([1, "now", "tag"], digest)})
    assert Digests(place).get(log, old) == digest
    assert Digests(place).get(log, young) is None
    assert Digests(place).get("s3://b/log", [1, "now", "tag"]) == digest
    assert Digests(place).get("s3://b/log", [1, "now", "other"]) is None
    found = {"stamp": young, "bytes": 1, "sha256": "a"}
    entries = [{}, [1], found, found | {"prefixes": 1}, found | {"prefixes": {"a": 1}}]
    for value in [1, {"logs": [1]}, *({"logs": {log: entry}} for entry in entries)]:
        file.write_text(json.dumps(value))  # JSON of another form once ended ingest
        assert Digests(place).get(log, young) is None
    file.write_text("{")
    assert Digests(place).get(log, young) is None


def put(place: Place, names) -> None:
    for name in names:
        place.write(name, LINES)


def test_logs_of_a_bucket_are_found_by_the_same_rules(s3_env):
    url = s3_env.url("find")
    names = ["capture.jsonl", "capture.jsonl.1", "b.jsonl.zst"]
    put(place_of(url), [*names, "README.md", "x.jsonl.gz.tmp", ".hidden.jsonl", "sub/c.jsonl"])
    logs, aside = find_logs([f"{url}/"])
    assert [*logs] == sorted(f"{url}/{name}" for name in names)
    assert aside == {url: ["README.md", "sub/", "x.jsonl.gz.tmp"]}
    assert [*find_logs([f"{url}/README.md"])[0]] == [f"{url}/README.md"]
    assert [*find_logs([f"{url}/capture*"])[0]] == [f"{url}/{name}" for name in names[:2]]
    assert [*find_logs([f"{url}/su*"])[0]] == [f"{url}/sub/c.jsonl"]
    assert [*find_logs([f"{url}/*/*.jsonl"])[0]] == [f"{url}/sub/c.jsonl"]
    before = find_logs([url])[0][f"{url}/capture.jsonl"]
    assert find_logs([f"{url}/capture.jsonl"])[0] == {f"{url}/capture.jsonl": before}
    place_of(url).write("capture.jsonl", LINES + LINES)
    assert find_logs([url])[0][f"{url}/capture.jsonl"] != before
    assert digest_log(f"{url}/capture.jsonl", set())[0] == 2 * len(LINES)
    for missing in (f"{url}/none", f"{url}/none*", s3_env.url("empty")):
        with pytest.raises(ValueError, match=r"ingest\.logs: no such file, folder or glob: s3://"):
            find_logs([missing])
    put(place_of(url), ["empty/README.md"])
    with pytest.raises(ValueError, match=r"no \*\.jsonl.* file in s3://"):
        find_logs([f"{url}/empty"])


def test_copies_of_killed_readers_are_removed_after_a_day(bucket, tmp_path):
    place_of(bucket).write("a.jsonl", b"{}")
    copies = tmp_path / "scratch" / "logs_read"
    for name in ("flywheel-old", "flywheel-new", "mine"):
        (copies / name).mkdir(parents=True)
        (copies / name / "a.jsonl").write_text("x")
    for name in ("flywheel-old", "mine"):
        os.utime(copies / name, (1, 1))
    with on_disk(f"{bucket}/a.jsonl", copies) as path:
        assert path.read_text() == "{}"
        assert path.parent.parent == copies
        assert len(list(copies.iterdir())) == 3
    assert {path.name for path in copies.iterdir()} == {"flywheel-new", "mine"}
