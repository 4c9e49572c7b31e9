"""The rules by which log records become samples, from the configuration and the target."""

import json

from dflash.identity import legacy_target_id, target_id
from jobs.base.config import Config
from store.log_formats import Rules


def make_rules(cfg: Config) -> Rules:
    """The rules of this configuration, with the target's identity and vocabulary size.

    Raises ValueError for a target folder without a config.json that has a vocab_size.
    """
    path = cfg.target_path / "config.json"
    if not cfg.target_path.is_dir():
        raise ValueError(
            f"target.path {cfg.target_path}: no such folder. It is the folder of the model that "
            "you serve; `flywheel target` makes the demo's"
        )
    try:
        vocab_size = int(json.loads(path.read_bytes())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: no model configuration with a vocab_size. target.path names the folder of "
            "the target; `flywheel target` makes the demo's"
        ) from error
    return Rules(
        target_id=target_id(cfg.target_path),
        vocab_size=vocab_size,
        default_domain=cfg.ingest.default_domain,
        min_output_tokens=cfg.ingest.min_output_tokens,
        val_percent=cfg.ingest.val_percent,
        test_percent=cfg.ingest.test_percent,
        former_ids=(legacy_target_id(cfg.target_path),),
        models=tuple(sorted(cfg.ingest.models)),
        text=cfg.ingest.text_logs,
    )
