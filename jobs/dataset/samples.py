"""Traffic joined with its features: what training and replay read."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dflash.batches import Sample
from dflash.identity import legacy_target_id, target_id
from dflash.replay import Request
from jobs.base.config import Config
from jobs.base.target_facts import target_config, target_taps
from store.feature_codec import DTYPES
from store.features import (
    cache_key,
    check_all_harvested,
    ids_digest,
    read_shard,
    read_top,
)
from store.set_aside import read_set_aside
from store.shards import shard_paths
from store.traffic_table import read_traffic


def captured_top_k(cfg: Config) -> int:
    """How many log-probabilities per position training reads: 0 for train.loss=ce.

    Raises ValueError if train.loss needs them and harvest.top_k is 0.
    """
    if cfg.train.loss == "ce":
        return 0
    if cfg.harvest.top_k == 0:
        raise ValueError(
            f"train.loss={cfg.train.loss} needs the target's log-probabilities: put `harvest: "
            f"{{top_k: {16 if cfg.train.loss == 'kl' else 1}}}` into the config file and run "
            "`flywheel harvest` with it"
        )
    return cfg.harvest.top_k


def captured(cfg: Config) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{sample id: (token ids int32 [n_output, top_k], log-probabilities float16 of that shape)} of
    the target's most likely tokens, for all harvested samples; {} if train.loss does not need them.

    Raises ValueError as `captured_top_k`, and for features that are not those of this target.
    """
    top_k = captured_top_k(cfg)
    if not top_k:
        return {}
    identity = target_id(cfg.target_path)
    taps, hidden = list(target_taps(cfg)), target_config(cfg)["hidden_size"]
    return {
        name: (ids, logprobs)
        for path in shard_paths(features_folder(cfg, identity))
        for name, ids, logprobs in read_top(path, identity, taps, hidden, top_k)
    }


def make_sample(row: dict, features: torch.Tensor, *top: torch.Tensor) -> Sample:
    """A TRAFFIC row, its features and, if captured, top ids and log-probabilities as a sample."""
    ids = torch.tensor([*row["prompt_ids"], *row["output_ids"]])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for span in row["loss_mask"]:
        mask[span["start"] : span["end"]] = True
    return Sample(row["sample_id"], row["domain"], ids, mask, features, *top)


def make_request(row: dict, features: torch.Tensor) -> Request:
    """A TRAFFIC row and its features as a request to replay."""
    ids = torch.tensor([*row["prompt_ids"], *row["output_ids"]])
    return Request(ids, len(row["prompt_ids"]), features)


def load_requests(
    cfg: Config, split: str, sampled: bool = False, taps: Sequence[int] = ()
) -> tuple[list[dict], list[Request]]:
    """Rows of a split with their requests, in sample_id order: only greedy ones, or all if
    `sampled`.

    taps: the target layers whose features are read; the configured ones if empty.
    """
    rows = load_rows(cfg, split, sampled, taps)
    return rows, with_features(cfg, rows, taps)


def load_rows(
    cfg: Config, split: str, sampled: bool = False, taps: Sequence[int] = ()
) -> list[dict]:
    """TRAFFIC rows of a split in sample_id order, without those set aside under these taps: only
    greedy ones, or all if `sampled`.
    """
    aside = set_aside(cfg, taps)
    rows = read_traffic(cfg.path("traffic"), target_id(cfg.target_path), split).to_pylist()
    return [
        row
        for row in rows
        if (sampled or row["temperature"] == 0.0) and row["sample_id"] not in aside
    ]


def rows_with_rounds(cfg: Config, taps: Sequence[int] = ()) -> list[dict]:
    """Greedy held-out rows (evaluate.split) whose answer has more than one token, so that it has a
    round. They can be sent to a server again. Raises ValueError if there is none.
    """
    rows = load_rows(cfg, cfg.evaluate.split, taps=taps)
    rows = [row for row in rows if len(row["output_ids"]) > 1]
    if not rows:
        fix = "ingest more conversations or set evaluate.split"
        raise none_of_target(cfg, f"greedy {cfg.evaluate.split} sample", fix)
    return rows


def with_features(cfg: Config, rows: list[dict], taps: Sequence[int] = ()) -> list[Request]:
    """TRAFFIC rows as requests to replay.

    Raises ValueError for rows that were not harvested, and for features that are damaged or were
    made from other token ids.
    """
    identity = target_id(cfg.target_path)
    taps, hidden = list(taps or target_taps(cfg)), target_config(cfg)["hidden_size"]
    digests = {
        row["sample_id"]: ids_digest([*row["prompt_ids"], *row["output_ids"]]) for row in rows
    }
    features = {
        name: found
        for path in shard_paths(features_folder(cfg, identity, taps))
        for name, found in read_shard(path, identity, taps, hidden, digests)
    }
    check_all_harvested(features, digests)
    return [make_request(row, features[row["sample_id"]]) for row in rows]


def set_aside(cfg: Config, taps: Sequence[int] = ()) -> set[str]:
    """Ids of the samples that harvest set aside under these taps: training does not use them."""
    folder = features_folder(cfg, target_id(cfg.target_path), taps)
    return set(read_set_aside(cfg.path("set_aside"), folder.name))


def features_folder(cfg: Config, identity: str, taps: Sequence[int] = ()) -> Path:
    """The folder of the feature cache for this target, these taps (default: the configured ones),
    harvest.features and harvest.top_k.
    """
    dtype, top_k = DTYPES[cfg.harvest.features], cfg.harvest.top_k
    key = cache_key(identity, list(taps or target_taps(cfg)), dtype, top_k)
    return cfg.path("features", key)


def none_of_target(cfg: Config, what: str, fix: str) -> ValueError:
    """The error of a stage that finds no `what` ("test sample", say) of this target in traffic/.

    If traffic/ has rows under the id that an older release gave this target, the message says so.
    """
    identity, folder = target_id(cfg.target_path), cfg.path("traffic")
    former = legacy_target_id(cfg.target_path)
    if not read_traffic(folder, identity).num_rows and read_traffic(folder, former).num_rows:
        fix = (
            f"its samples were made under this folder's former id {former}, which did not cover "
            "all bytes of the weights: run `flywheel ingest` again, on the logs they came from"
        )
    return ValueError(f"{folder} has no {what} of target {identity}: {fix}")
