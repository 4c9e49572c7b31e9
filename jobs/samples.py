"""Traffic joined with its features: what training and replay read."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dflash.loss import Sample
from dflash.replay import Request
from dflash.target import target_id
from jobs.config import Config
from jobs.harvest import features_folder
from jobs.shape import target_config, target_taps
from store.features import read_shard
from store.schemas import FEATURES
from store.shards import read_dataset, shard_paths
from store.traffic import read_traffic


def load_samples(cfg: Config, splits: Sequence[str]) -> dict[str, list[Sample]]:
    """Samples of each split in sample_id order, features in memory as bfloat16.

    Raises ValueError when a sample has no features yet, or features of another shape.
    """
    identity = target_id(cfg.target_path)
    traffic = {split: read_traffic(cfg.path("traffic"), identity, split) for split in splits}
    rows = {row["sample_id"]: row for table in traffic.values() for row in table.to_pylist()}
    features = _features(features_folder(cfg, identity), cfg, identity, set(rows))
    missing = [name for name in rows if name not in features]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(rows)} samples have no features (for instance {missing[0]}): "
            "run `flywheel harvest`"
        )
    return {
        split: [make_sample(rows[name], features[name]) for name in table["sample_id"].to_pylist()]
        for split, table in traffic.items()
    }


def check_features(cfg: Config) -> None:
    """Raise ValueError unless every train and val sample has features; reads no tensor."""
    identity = target_id(cfg.target_path)
    folder = features_folder(cfg, identity)
    known = set(read_dataset(folder, FEATURES, columns=["sample_id"])["sample_id"].to_pylist())
    wanted = [
        name
        for split in ("train", "val")
        for name in read_traffic(cfg.path("traffic"), identity, split)["sample_id"].to_pylist()
    ]
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(wanted)} samples have no features (for instance "
            f"{missing[0]}): run `flywheel harvest`"
        )


def make_sample(row: dict, features: torch.Tensor) -> Sample:
    """A TRAFFIC row and its features as a training sample."""
    ids = torch.tensor([*row["prompt_ids"], *row["output_ids"]])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for span in row["loss_mask"]:
        mask[span["start"] : span["end"]] = True
    return Sample(row["sample_id"], row["domain"], ids, mask, features)


def make_request(row: dict, features: torch.Tensor) -> Request:
    """A TRAFFIC row and its features as a request to replay."""
    ids = torch.tensor([*row["prompt_ids"], *row["output_ids"]])
    return Request(ids, len(row["prompt_ids"]), features)


def load_requests(
    cfg: Config, split: str, sampled: bool = False
) -> tuple[list[dict], list[Request]]:
    """Rows of a split with their requests, in sample_id order: greedy ones, or `sampled`, all."""
    identity = target_id(cfg.target_path)
    rows = read_traffic(cfg.path("traffic"), identity, split).to_pylist()
    rows = [row for row in rows if sampled or row["temperature"] == 0.0]
    return rows, with_features(cfg, rows)


def with_features(cfg: Config, rows: list[dict]) -> list[Request]:
    """TRAFFIC rows as requests to replay. Raises ValueError for rows that were not harvested."""
    identity = target_id(cfg.target_path)
    names = {row["sample_id"] for row in rows}
    features = _features(features_folder(cfg, identity), cfg, identity, names)
    missing = names - features.keys()
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(names)} samples have no features (for instance "
            f"{min(missing)}): run `flywheel harvest`"
        )
    return [make_request(row, features[row["sample_id"]]) for row in rows]


def _features(folder: Path, cfg: Config, identity: str, wanted: set[str]) -> dict:
    taps, hidden = list(target_taps(cfg)), target_config(cfg)["hidden_size"]
    return {
        name: features
        for path in shard_paths(folder)
        for name, features, _ in read_shard(path, identity, taps, hidden)
        if name in wanted
    }
