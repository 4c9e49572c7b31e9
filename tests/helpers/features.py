"""Small feature caches."""

import pyarrow as pa
import torch

from store.feature_cache import FeatureCache
from store.feature_shards import write_shard
from store.features import features_row
from store.place import Place
from store.schemas import features_schema

TARGET, TAPS, HIDDEN = "t", [1, 5], 16
SHAPE = (TARGET, TAPS, HIDDEN)
SCHEMA = features_schema(*SHAPE)


def made(*names: str, tokens: int = 7) -> dict[str, torch.Tensor]:
    """Features of these samples, whose token ids are range(tokens)."""
    return {name: torch.randn(tokens, len(TAPS) * HIDDEN).bfloat16() for name in names}


def write(place: Place, samples: dict[str, torch.Tensor]) -> pa.Table:
    """A shard of these samples; its rows of FEATURE_INDEX."""
    rows = (features_row(name, range(len(x)), x) for name, x in samples.items())
    return write_shard(place, SCHEMA, rows)


def cache_of(place: Place, index: pa.Table, **more) -> FeatureCache:
    """A cache that keeps nothing, of an index of one shard or more."""
    values = {"digests": None, "budget": 0} | more
    return FeatureCache(place, index.sort_by("sample_id"), *SHAPE, **values)
