"""Where answers to the prompts of former targets are, for those who write them and for ingest."""

from dflash.identity import target_id
from jobs.base.config import Config
from store.place import Place


def answer_logs(cfg: Config) -> Place:
    """Logs of answers of the present target."""
    return cfg.place("regenerated", target_id(cfg.target_path), "answers")


def left_out(cfg: Config) -> Place:
    """Lists of samples whose prompts the present target will never answer, with reasons."""
    return cfg.place("regenerated", target_id(cfg.target_path), "left_out")
