"""Names of feature caches."""

from store.features import cache_key


def test_cache_key_depends_on_each_part():
    keys = {cache_key("t", [1, 2], "bfloat16"), cache_key("u", [1, 2], "bfloat16")}
    keys |= {cache_key("t", [1, 3], "bfloat16"), cache_key("t", [1, 2], "float32")}
    keys |= {cache_key("t", [1, 2], "bfloat16", 8), cache_key("t", [1, 2], "bfloat16", 16)}
    assert len(keys) == 6
    assert cache_key("t", [1, 2], "bfloat16") == cache_key("t", [1, 2], "bfloat16")
