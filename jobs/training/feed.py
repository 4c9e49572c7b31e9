"""What a training worker reads: samples in the order of the mix, and their features when they are
needed. The next step's batches are made while this step is computed.
"""

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dflash.batches import Sample, valid_anchors
from dflash.domain_mix import block_tokens, replay_mix
from jobs.base.config import Config
from jobs.dataset.samples import (
    StoredRequest,
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
    not_in_traffic,
    token_batches,
    top_batches,
)
from jobs.training.runs import Pin
from store.feature_cache import FeatureCache
from store.feature_index import check_all_harvested

T = TypeVar("T")
GIB = 1 << 30


@dataclass(frozen=True)
class TrainingSet:
    """Samples without features: first `num_main` of train.domain (or all), then the others."""

    samples: MappedSamples
    num_main: int
    share: float
    """Share of the picks that come from the others (dflash/domain_mix.py)."""
    block_tokens: array
    """Mean supervised slots that each sample gives when it is drawn once (float64)."""
    lengths: array
    """Tokens of each sample (int32)."""
    supervised: int
    """Supervised tokens of all samples."""
    most_anchors: int
    """Anchors of the sample that has the most."""
    num_skipped: int
    """Samples that were left out: without two supervised tokens in a row they have no anchor."""
    num_cut: int
    """Samples that train.max_length shortens to their beginning."""


def training_set(
    cfg: Config, pin: Pin, num_drafts: int, folder: Path | None = None, with_top: bool = True
) -> TrainingSet:
    """The pinned train samples that train.domain and train.mix ask for, each cut to
    train.max_length, with the target's log-probabilities if train.loss needs them, unless
    `with_top` is False. Reads no features.

    Token ids stay in files of `folder`, by default that in the scratch folder
    (jobs/training/mapped.py). Raises ValueError if no sample has an anchor, for a domain or mix
    without samples, and for samples that were deleted.
    """
    top_k = captured_top_k(cfg) if with_top else 0
    every = _mapped_samples(cfg, pin, folder or cfg.path("training_data"), top_k)
    blocks = (cfg.train.anchors, num_drafts, cfg.train.random_block)
    kept, lengths, anchors, supervised = (array("i") for _ in range(4))
    domains, tokens, num_cut = list[str](), array("d"), 0
    for i in range(len(every)):
        sample = every[i]
        if num_anchors := len(valid_anchors(sample.loss_mask)):
            kept.append(i)
            domains.append(sample.domain)
            tokens.append(block_tokens(sample.loss_mask, *blocks))
            lengths.append(len(sample.ids))
            anchors.append(num_anchors)
            supervised.append(int(sample.loss_mask.sum()))
            num_cut += len(sample.ids) < every.whole_length(i)
    if not kept:
        longest = cfg.train.max_length
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
        block_tokens=array("d", (tokens[i] for i in order)),
        lengths=array("i", (lengths[i] for i in order)),
        supervised=sum(supervised[i] for i in order),
        most_anchors=max(anchors[i] for i in order),
        num_skipped=len(every) - len(kept),
        num_cut=num_cut,
    )


def _mapped_samples(cfg: Config, pin: Pin, folder: Path, top_k: int) -> MappedSamples:
    rows = pin.train
    names, top = rows["sample_id"].combine_chunks(), None

    def read_top() -> Iterator[pa.RecordBatch]:
        index = harvested(cfg, names)
        check_all_harvested(index["sample_id"].to_pylist(), names.to_pylist())
        return top_batches(stored_top(cfg, index))

    tokens = mapped(
        folder / f"tokens-{pin.key}.arrow",
        TOKENS,
        lambda: token_batches(rows, with_tokens(cfg, rows)),
    )
    if top_k:
        top = mapped(folder / f"top-{pin.key}-{top_k}.arrow", TOP, read_top)
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


def val_requests(cfg: Config, pin: Pin) -> list[tuple[str, StoredRequest]]:
    """(domain, request) of `val_rows`. Raises ValueError for samples that were deleted or have no
    features; features are read when they are asked for.
    """
    rows = val_rows(cfg, pin)
    domains = dict(zip(rows["sample_id"].to_pylist(), rows["domain"].to_pylist(), strict=True))
    tokens = {r["sample_id"]: r for batch in with_tokens(cfg, rows) for r in batch.to_pylist()}
    if gone := domains.keys() - tokens:
        raise ValueError(not_in_traffic(list(gone)))
    found = with_features(cfg, [tokens[name] for name in domains])
    return [(domains[request.sample_id], request) for request in found]


def training_features(cfg: Config, data: TrainingSet) -> FeatureCache:
    """The features of a training set, cut as its samples are. At most train.cache_gib of them are
    kept in memory, beside those of the next step.
    """
    budget, train = cfg.train.cache_gib * GIB, cfg.train
    return feature_cache(
        cfg,
        *data.samples.digests(),
        budget,
        max_length=train.max_length,
        readers=train.readers,
    )


class LazySamples(Sequence[Sample]):
    """The samples of a training set. A sample's features are read when it is taken."""

    def __init__(self, samples: MappedSamples, features: FeatureCache):
        self.samples, self.features = samples, features

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self.samples[index]
        return replace(sample, features=self.features[sample.sample_id])

    def prefetch(self, indices: Iterable[int]) -> None:
        """Begin to read the features of these samples, which are then taken in this order."""
        self.features.prefetch(map(self.samples.name, indices))


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
