"""flywheel convert convert.source=FOLDER convert.dest=NEW [convert.format=speculators]

Rewrite a drafter folder in z-lab's or speculators' format. Tensors are copied bit for bit. A
drafter with a setting that the other format cannot express is refused (dflash/config_formats.py).
"""

from typing import Any

from dflash.checkpoint import convert_folder
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.target_facts import target_config


def run(cfg: Config) -> dict[str, Any]:
    """Convert the folder and return the summary.

    Raises ValueError for a folder that cannot be read, and for a setting that the other format
    cannot express.
    """
    wanted = cfg.convert
    if not (wanted.source and wanted.dest):
        raise ValueError("set convert.source to a drafter folder and convert.dest to a new one")
    target_config(cfg)  # without a target it raises an error that says what to set
    verifier = wanted.verifier or str(cfg.target_path)
    shape = convert_folder(wanted.source, wanted.dest, wanted.format, cfg.target_path, verifier)
    return {
        "stage": "convert",
        "folder": wanted.dest,
        "format": wanted.format,
        "block_size": shape.block_size,
        "target_layer_ids": list(shape.target_layer_ids),
        "sliding_window": shape.sliding_window,
        "is_causal": shape.is_causal,
    }


if __name__ == "__main__":
    run_as_module("convert")
