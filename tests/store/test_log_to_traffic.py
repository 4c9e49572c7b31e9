"""From one log to published shards: each record once, and no byte is kept longer than allowed."""

from dataclasses import replace

import pytest

import store.log_to_traffic
from store.digests import digest_log
from store.log_to_traffic import ingest_log, publish, settle
from store.schemas import REJECTS, TRAFFIC
from store.shards import read_dataset, read_manifests
from tests.helpers.logs import RULES, line, pair
from tests.helpers.shards import verify


@pytest.fixture
def read(tmp_path):
    """Ingest the log as it is now; the bytes of what is rejected."""
    log, traffic, rejects = tmp_path / "log", tmp_path / "traffic", tmp_path / "rejects"

    def run(rules=RULES):
        sizes = {m["inputs"]["bytes"] for m in read_manifests(rejects)}
        size, sha256, prefixes = digest_log(log, sizes)
        result = ingest_log(log, size, sha256, rules, traffic, rejects)
        settle(rejects, result, prefixes)
        publish(traffic, log, result, prefixes)
        assert verify(rejects) == len([*rejects.glob("*.parquet")]), "nothing else is there"
        return read_dataset(rejects, REJECTS)["raw"].to_pylist()

    return run


def test_rejects_of_a_grown_log_are_counted_once(tmp_path, read):
    """The view `rejects` had them again for each earlier state of the log."""
    log = tmp_path / "log"
    log.write_bytes(line() + b"}{\n")
    assert read() == read() == [b"}{\n"]
    log.write_bytes(log.read_bytes() + b"]]\n" + line())
    assert read() == read() == [b"}{\n", b"]]\n"]
    log.write_bytes(line())  # another log: that it was this one is not known
    assert len(read()) == 2


def test_rejects_under_former_rules_are_counted_once(tmp_path, read):
    (tmp_path / "log").write_bytes(line() + b"}{\n")
    longer = replace(RULES, min_output_tokens=3)
    for rules in (RULES, longer, RULES, longer, longer, RULES):
        assert read(rules) == [b"}{\n"]
        count = len(read_dataset(tmp_path / "traffic", TRAFFIC))
        assert count == (rules is RULES)


def test_what_an_older_version_kept_without_consent_goes(tmp_path, read, monkeypatch):
    refused = pair(headers=[["X-Flywheel-Consent", "false"]])
    (tmp_path / "log").write_bytes(line() + b"{'secret': 1, 'consent': False}\n" + refused)
    with monkeypatch.context() as older:
        older.setattr("store.log_formats.may_refuse", lambda raw: False)
        older.setattr("store.log_formats.answers", lambda value: [])
        older.setattr(store.log_to_traffic, "READING", 1)
        assert len(read()) == 1
        assert len(read_dataset(tmp_path / "traffic", TRAFFIC)) == 2
    assert read() == []
    assert not [*(tmp_path / "rejects").glob("*.parquet")]
    assert len(read_dataset(tmp_path / "traffic", TRAFFIC)) == 1
    assert verify(tmp_path / "traffic") == len([*(tmp_path / "traffic").glob("*.parquet")])
