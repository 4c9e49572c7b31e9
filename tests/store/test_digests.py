"""Digests of logs."""

import hashlib

from store.digests import digest_log


def test_digest_knows_its_prefixes(tmp_path):
    data = b"a" * 3_000_000
    (tmp_path / "l").write_bytes(data)
    size, digest, prefixes = digest_log(f"{tmp_path}/l", {0, 7, 2_500_000, 9_000_000})
    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert set(prefixes) == {0, 7, 2_500_000, len(data)}
    assert prefixes[2_500_000] == hashlib.sha256(data[:2_500_000]).hexdigest()
