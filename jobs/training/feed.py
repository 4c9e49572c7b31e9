"""What a training worker reads: samples in the order of the mix, and their features when they are
needed. The next step's batches are made while this step is computed.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from dflash.batches import Sample, first_tokens, valid_anchors
from dflash.domain_mix import block_tokens, replay_mix
from dflash.identity import target_id
from dflash.replay import Request
from jobs.base.config import Config
from jobs.base.target_facts import target_config, target_taps
from jobs.dataset.samples import captured, features_folder, make_request, make_sample
from jobs.training.runs import Pin, PinnedRow, pinned_rows
from store.features import FeatureCache, ids_digest
from store.shards import shard_paths

T = TypeVar("T")
GIB = 1 << 30
NO_FEATURES = torch.empty(0, 0, dtype=torch.bfloat16)


@dataclass(frozen=True)
class TrainingSet:
    """Samples without features: first `num_main` of train.domain (or all), then the others."""

    samples: list[Sample]
    num_main: int
    share: float
    """Share of the picks that come from the others (dflash/domain_mix.py)."""
    block_tokens: list[float]
    """Mean supervised slots that each sample gives when it is drawn once."""
    num_skipped: int
    """Samples that were left out: without two supervised tokens in a row they have no anchor."""
    digests: dict[str, bytes]
    """Digest of the uncut token ids of each sample: its features must have been made from them."""
    num_cut: int
    """Samples that train.max_length shortens to their beginning."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample.ids) for sample in self.samples]


def training_set(cfg: Config, pin: Pin, num_drafts: int) -> TrainingSet:
    """The pinned train samples that train.domain and train.mix ask for, each cut to
    train.max_length, with the target's log-probabilities if train.loss needs them. Reads no
    features.

    Raises ValueError if no sample has an anchor, and for a domain or mix without samples.
    """
    top = captured(cfg)
    found = [
        make_sample(row, NO_FEATURES, *top.get(row["sample_id"], ()))
        for row in read_rows(cfg, pin.train)
    ]
    digests = {sample.sample_id: ids_digest(sample.ids.numpy()) for sample in found}
    longest = cfg.train.max_length or max((len(s.ids) for s in found), default=0)
    cut = [first_tokens(sample, longest) for sample in found]
    kept = [sample for sample in cut if len(valid_anchors(sample.loss_mask))]
    if not kept:
        within = (
            f" in its first {longest} tokens (train.max_length)" if cfg.train.max_length else ""
        )
        raise ValueError(
            f"none of {len(found)} training samples has two supervised tokens in a row{within}: "
            "look at loss_mask in traffic/, or ingest more conversations"
        )
    blocks = (cfg.train.anchors, num_drafts, cfg.train.random_block)
    tokens = [block_tokens(s.loss_mask, *blocks) for s in kept]
    mix = replay_mix([s.domain for s in kept], tokens, cfg.train.domain, cfg.train.mix)
    order = (*mix.main, *mix.others)
    return TrainingSet(
        [kept[i] for i in order],
        len(mix.main),
        mix.share,
        [tokens[i] for i in order],
        len(found) - len(kept),
        digests,
        sum(len(sample.ids) > longest for sample in found),
    )


def val_rows(cfg: Config, pin: Pin) -> list[dict[str, Any]]:
    """Pinned greedy val rows with at least one round, at most train.val_samples of each domain."""
    taken: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(cfg, pin.val):
        of_domain = taken.setdefault(row["domain"], [])
        usable = row["temperature"] == 0.0 and len(row["output_ids"]) > 1
        if usable and len(of_domain) < cfg.train.val_samples:
            of_domain.append(row)
    return [row for name in sorted(taken) for row in taken[name]]


def val_requests(cfg: Config, pin: Pin) -> list[tuple[str, Request]]:
    """(domain, request with features) of `val_rows`."""
    rows = val_rows(cfg, pin)
    digests = {
        row["sample_id"]: ids_digest([*row["prompt_ids"], *row["output_ids"]]) for row in rows
    }
    features = feature_cache(cfg, pin, digests, budget=0)
    return [(row["domain"], make_request(row, features[row["sample_id"]])) for row in rows]


def read_rows(cfg: Config, pinned: Sequence[PinnedRow]) -> Iterator[dict[str, Any]]:
    """The pinned samples with their prompt and output ids."""
    return pinned_rows(cfg, pinned, ["prompt_ids", "output_ids"])


def feature_cache(
    cfg: Config, pin: Pin, digests: Mapping[str, bytes], budget: float, max_length: int = 0
) -> FeatureCache:
    """The features of the samples in `digests` (sample id -> `ids_digest` of its tokens), cut to
    `max_length` tokens; 0: uncut. At most `budget` bytes of them are kept in memory.

    If several files hold a sample, the file named in the pin is used.
    """
    identity, files = target_id(cfg.target_path), set(pin.files)
    return FeatureCache(
        sorted(shard_paths(features_folder(cfg, identity)), key=lambda path: path.name in files),
        identity,
        list(target_taps(cfg)),
        target_config(cfg)["hidden_size"],
        digests,
        budget,
        max_length,
    )


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
