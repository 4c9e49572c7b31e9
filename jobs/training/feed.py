"""What a training worker reads: samples in the order of the mix, and their features when they are
needed. The next step's batches are made while this step is computed.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dflash.batches import Sample, valid_anchors
from dflash.domain_mix import block_tokens, replay_mix
from jobs.base.config import Config
from jobs.dataset.samples import (
    Requests,
    captured_top_k,
    feature_cache,
    harvested,
    stored_top,
    with_features,
    with_tokens,
)
from jobs.training.mapped import (
    TOKENS,
    TOP,
    MappedSamples,
    mapped,
    token_batches,
    top_batches,
)
from jobs.training.runs import Pin
from store.feature_cache import FeatureCache
from store.features import ids_digest

T = TypeVar("T")
GIB = 1 << 30


@dataclass(frozen=True)
class TrainingSet:
    """Samples without features: first `num_main` of train.domain (or all), then the others."""

    samples: MappedSamples
    num_main: int
    share: float
    """Share of the picks that come from the others (dflash/domain_mix.py)."""
    block_tokens: list[float]
    """Mean supervised slots that each sample gives when it is drawn once."""
    lengths: list[int]
    """Tokens of each sample."""
    supervised: int
    """Supervised tokens of all samples."""
    most_anchors: int
    """Anchors of the sample that has the most."""
    num_skipped: int
    """Samples that were left out: without two supervised tokens in a row they have no anchor."""
    digests: dict[str, bytes]
    """Digest of the uncut token ids of each sample: its features must have been made from them."""
    num_cut: int
    """Samples that train.max_length shortens to their beginning."""


def training_set(cfg: Config, pin: Pin, num_drafts: int, write: bool = True) -> TrainingSet:
    """The pinned train samples that train.domain and train.mix ask for, each cut to
    train.max_length, with the target's log-probabilities if train.loss needs them. Reads no
    features. Its token ids are in files of the scratch folder (jobs/training/mapped.py), or in
    memory if not `write`.

    Raises ValueError if no sample has an anchor, and for a domain or mix without samples.
    """
    every = _mapped_samples(cfg, pin, write)
    blocks = (cfg.train.anchors, num_drafts, cfg.train.random_block)
    longest = cfg.train.max_length
    kept, domains, tokens, lengths, anchors, digests = [], [], [], [], [], {}
    supervised, num_cut = [], 0
    for i in range(len(every)):
        whole, sample = every.whole(i), every[i]
        if not len(valid := valid_anchors(sample.loss_mask)):
            continue
        kept.append(i)
        domains.append(sample.domain)
        tokens.append(block_tokens(sample.loss_mask, *blocks))
        lengths.append(len(sample.ids))
        anchors.append(len(valid))
        supervised.append(int(sample.loss_mask.sum()))
        digests[sample.sample_id] = ids_digest(whole.ids.numpy())
        num_cut += len(sample.ids) < len(whole.ids)
    if not kept:
        within = f" in its first {longest} tokens (train.max_length)" if longest else ""
        raise ValueError(
            f"none of {len(every)} training samples has two supervised tokens in a row{within}: "
            "look at loss_mask in traffic/, or ingest more conversations"
        )
    mix = replay_mix(domains, tokens, cfg.train.domain, cfg.train.mix)
    order = (*mix.main, *mix.others)
    return TrainingSet(
        samples=every.subset([kept[i] for i in order]),
        num_main=len(mix.main),
        share=mix.share,
        block_tokens=[tokens[i] for i in order],
        lengths=[lengths[i] for i in order],
        supervised=sum(supervised[i] for i in order),
        most_anchors=max(anchors[i] for i in order),
        num_skipped=len(every) - len(kept),
        digests=digests,
        num_cut=num_cut,
    )


def _mapped_samples(cfg: Config, pin: Pin, write: bool) -> MappedSamples:
    rows, top_k = pin.train, captured_top_k(cfg)
    names = rows["sample_id"].combine_chunks()
    top = None
    tokens = token_batches(rows, with_tokens(cfg, rows))
    tops = top_batches(stored_top(cfg, harvested(cfg, names))) if top_k else ()
    if write:
        folder = cfg.path("training_data")
        tokens = mapped(folder / f"tokens-{pin.key}.arrow", TOKENS, tokens)
        if top_k:
            top = mapped(folder / f"top-{pin.key}-{top_k}.arrow", TOP, tops)
    else:
        tokens = pa.Table.from_batches(tokens, TOKENS)
        top = pa.Table.from_batches(tops, TOP) if top_k else None
    return MappedSamples(tokens, names, top, top_k, cfg.train.max_length)


def val_rows(cfg: Config, pin: Pin) -> pa.Table:
    """Pinned greedy val rows with at least one round, at most train.val_samples of each domain,
    ordered by domain.
    """
    greedy = (pc.field("temperature") == 0.0) & (pc.field("output_tokens") > 1)
    rows = pin.val.filter(greedy).sort_by([("domain", "ascending"), ("sample_id", "ascending")])
    domains = np.array(rows["domain"].to_pylist(), object)
    _, starts, counts = np.unique(domains.astype(str), return_index=True, return_counts=True)
    taken = [
        start + i
        for start, count in sorted(zip(starts.tolist(), counts.tolist(), strict=True))
        for i in range(min(count, cfg.train.val_samples))
    ]
    return rows.take(pa.array(taken, pa.int64()))


def val_requests(cfg: Config, pin: Pin) -> list[tuple[str, Any]]:
    """(domain, request with features) of `val_rows`."""
    rows = val_rows(cfg, pin)
    domains = dict(zip(rows["sample_id"].to_pylist(), rows["domain"].to_pylist(), strict=True))
    tokens = {r["sample_id"]: r for batch in with_tokens(cfg, rows) for r in batch.to_pylist()}
    found: Requests = with_features(cfg, [tokens[name] for name in domains])
    return [(domains[request.sample_id], request) for request in found]


def training_features(cfg: Config, data: TrainingSet) -> FeatureCache:
    """The features of a training set, cut as its samples are. At most train.cache_gib of them are
    kept in memory.
    """
    budget = cfg.train.cache_gib * GIB
    return feature_cache(cfg, data.digests, budget, max_length=cfg.train.max_length)


class LazySamples(Sequence[Sample]):
    """The samples of a training set. A sample's features are read when it is taken."""

    def __init__(self, samples: Sequence[Sample], features: FeatureCache):
        self.samples, self.features = samples, features

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self.samples[index]
        return replace(sample, features=self.features[sample.sample_id])


def prefetched(make: Callable[[int], T], steps: Iterable[int]) -> Generator[T, None, None]:
    """make(step) for every step. A thread makes the next one while the caller uses this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
        waiting = None
        for step in steps:
            coming = pool.submit(make, step)
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()
