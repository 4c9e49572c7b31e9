"""Traffic joined with its features: what training and replay read."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dflash.identity import legacy_target_id, target_id
from dflash.loss import Sample
from dflash.replay import Request
from jobs.base.config import Config
from jobs.base.target_facts import target_config, target_taps
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

FEATURE_DTYPE = "bfloat16"


def captured_top_k(cfg: Config) -> int:
    """How many log-probabilities a position training reads: 0 for train.loss=ce.

    Raises ValueError if train.loss needs them and none are harvested.
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
    """Ids and log-probabilities of the target's likeliest tokens by sample id, if train.loss needs
    them; of the samples that are harvested. Raises ValueError as `with_features`.
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
    """Rows of a split with their requests, in sample_id order: greedy ones, or `sampled`, all.

    taps: those whose features are read; the configured ones if empty.
    """
    rows = load_rows(cfg, split, sampled, taps)
    return rows, with_features(cfg, rows, taps)


def load_rows(
    cfg: Config, split: str, sampled: bool = False, taps: Sequence[int] = ()
) -> list[dict]:
    """TRAFFIC rows of a split in sample_id order, without those set aside under these taps: greedy
    ones, or `sampled`, all.
    """
    aside = set_aside(cfg, taps)
    rows = read_traffic(cfg.path("traffic"), target_id(cfg.target_path), split).to_pylist()
    return [
        row
        for row in rows
        if (sampled or row["temperature"] == 0.0) and row["sample_id"] not in aside
    ]


def rows_with_rounds(cfg: Config, taps: Sequence[int] = ()) -> list[dict]:
    """Greedy held-out rows (evaluate.split) of more than one token, to ask a server for again.

    Raises ValueError if there is none.
    """
    rows = load_rows(cfg, cfg.evaluate.split, taps=taps)
    rows = [row for row in rows if len(row["output_ids"]) > 1]
    if not rows:
        fix = "ingest more conversations or set evaluate.split"
        raise none_of_target(cfg, f"greedy {cfg.evaluate.split} sample", fix)
    return rows


def with_features(cfg: Config, rows: list[dict], taps: Sequence[int] = ()) -> list[Request]:
    """TRAFFIC rows as requests to replay.

    Raises ValueError for rows that were not harvested, and for features that are not what was
    written for these token ids.
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
    """Ids of the samples that harvest set aside under these taps: nothing learns from them."""
    folder = features_folder(cfg, target_id(cfg.target_path), taps)
    return set(read_set_aside(cfg.path("set_aside"), folder.name))


def features_folder(cfg: Config, identity: str, taps: Sequence[int] = ()) -> Path:
    """The cache folder of this target, these taps (default: the configured ones), this layout,
    this harvest.top_k.
    """
    key = cache_key(identity, list(taps or target_taps(cfg)), FEATURE_DTYPE, cfg.harvest.top_k)
    return cfg.path("features", key)


def none_of_target(cfg: Config, what: str, fix: str) -> ValueError:
    """The error of a stage that finds no `what` ("test sample", say) of this target in traffic/.

    Rows that an earlier version named by this folder's former identity are said to be just that.
    """
    identity, folder = target_id(cfg.target_path), cfg.path("traffic")
    former = legacy_target_id(cfg.target_path)
    if not read_traffic(folder, identity).num_rows and read_traffic(folder, former).num_rows:
        fix = (
            f"its samples were made under this folder's former id {former}, which did not cover "
            "all bytes of the weights: run `flywheel ingest` again, on the logs they came from"
        )
    return ValueError(f"{folder} has no {what} of target {identity}: {fix}")
