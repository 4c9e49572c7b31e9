"""store.place: one behaviour on a local disk and in a bucket."""

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from store.place import Place, first_line, place_of, read_json, write_json
from store.tables import Table


@pytest.fixture(params=["local", "bucket"])
def place(request, tmp_path) -> Place:
    """A place that nothing has written to."""
    url = str(tmp_path / "work") if request.param == "local" else request.getfixturevalue("bucket")
    return place_of(url) / "some"


def test_what_is_written_is_read(place):
    assert place.read("a/b.json") is None
    assert not place.has("a/b.json")
    assert list(place.objects()) == []
    place.write("a/b.json", b"1")
    place.write("a/b.json", b"23")
    assert place.read("a/b.json") == b"23"
    [found] = place.objects()
    assert (found.name, found.size) == ("a/b.json", 2)
    place.write("a/b.json", b"45")
    assert next(place.objects()).e_tag != found.e_tag, "it changes with every write"
    assert (place / "a").read("b.json") == b"45"
    assert place.folders() == ["a"]
    place.delete(["a/b.json", "absent"])
    assert not place.has("a/b.json")


def test_one_of_twenty_creates(place):
    with ThreadPoolExecutor(20) as pool:
        won = list(pool.map(lambda i: place.create("only", b"%d" % i), range(20)))
    assert won.count(True) == 1
    assert place.read("only") == b"%d" % won.index(True)


def test_a_folder_is_published_and_fetched(place, tmp_path):
    (tmp_path / "made" / "sub").mkdir(parents=True)
    (tmp_path / "made" / "config.json").write_text("{}")
    (tmp_path / "made" / "sub" / "weights").write_bytes(b"w" * 10_000)
    place.publish(tmp_path / "made", "config.json")
    copy = place.fetch(tmp_path / "cache")
    assert (copy / "sub" / "weights").read_bytes() == b"w" * 10_000
    place.write("config.json", b'{"a": 1}')
    assert (place.fetch(tmp_path / "cache") / "config.json").read_text() == '{"a": 1}'


def test_an_absent_folder_is_not_fetched(bucket, tmp_path):
    with pytest.raises(FileNotFoundError):
        (place_of(bucket) / "nothing").fetch(tmp_path)


def test_ranges_are_read(place):
    place.write("long", bytes(range(256)) * 100)
    with place.open("long") as file:
        file.seek(256)
        assert file.read(3) == b"\0\1\2"


def test_json(place):
    assert read_json(place, "x.json") is None
    assert write_json(place, "x.json", {"a": (1, 2)}) == {"a": [1, 2]}
    assert read_json(place, "x.json", ["a"]) == {"a": [1, 2]}
    with pytest.raises(ValueError, match=r"x.json is damaged \(it lacks b\): run it"):
        read_json(place, "x.json", ["b"], "run it")
    place.write("x.json", b"[1")
    with pytest.raises(ValueError, match="is damaged"):
        read_json(place, "x.json")


def test_reading_makes_no_local_folder(tmp_path):
    place = place_of(str(tmp_path / "absent"))
    assert place.read("x") is None
    assert list(place.objects()) == []
    place.delete(["x"])
    assert not (tmp_path / "absent").exists()


def test_an_identity_that_may_not_write_is_told(s3, monkeypatch):
    url = s3.url("denied")
    for name, value in s3.readonly_env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PermissionError) as found:
        place_of(url).write("x", b"")
    assert url in str(found.value.filename)
    assert "check the permissions" in str(found.value.strerror)


def test_a_missing_bucket_is_named(s3_env):
    place = place_of("s3://no-such-bucket/run")
    with pytest.raises(FileNotFoundError, match="no such bucket: create it"):
        list(place.objects())
    with pytest.raises(FileNotFoundError, match="no such bucket: create it"):
        Table(place / "traffic", pa.schema([("n", pa.int32())])).version()


def test_azure_without_an_account_says_what_to_set(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    place = place_of("az://container/run")
    for call in (place.read, place.open):
        with pytest.raises(ValueError, match="AZURE_STORAGE_ACCOUNT_NAME: set it"):
            call("a")


def test_an_error_of_the_table_library_names_its_cause():
    arrow = "\x1b[31m\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}\x1b[0m"
    text = f"Kernel error -> Generic S3 error\n   {arrow} retried\n    {arrow} Connection refused\n"
    assert first_line(OSError(text)) == "Kernel error -> Generic S3 error: Connection refused"
    assert first_line(OSError("one\ntwo")) == "one"
    assert first_line(OSError()) == "OSError"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "names no bucket: write s3://BUCKET/FOLDER"),
        ("s3:///run", "names no bucket"),
        ("s3:/bucket/run", "write s3://bucket/run for a place in a bucket, ./s3:/bucket/run for"),
        ("http://bucket/run", "begins with s3://, gs://, az://"),
    ],
)
def test_a_url_of_no_bucket_is_no_local_folder(url, message):
    with pytest.raises(ValueError, match=message):
        place_of(url)


def test_a_local_folder_may_have_a_colon(tmp_path):
    for name in ("s3:", "s3:x", "a:/b"):
        assert place_of(f"{tmp_path}/{name}").path == tmp_path / name
