"""Defaults that depend on how large the target is.

The sections hold the defaults for a target of about 8 B parameters. A profile replaces those that
another size needs. A config file and the command line replace both.
docs/how-to/settings.md has the table with the source of each value.
"""

from pathlib import Path
from typing import Any

PROFILES: dict[str, dict[str, Any]] = {
    "small": {
        "select.tokens": 4_000_000,
        "select.domain_tokens": 1_000_000,
        "drafter.layers": 2,
        "drafter.block_size": 8,
        "drafter.draft_vocab": 8192,
        "train.steps": 150,
        "train.batch_size": 4,
        "train.anchors": 32,
        "train.max_length": 0,
        "train.optimizer": "muon",
        "train.lr": 2e-2,
        "train.warmup": 0.05,
        "train.val_every": 75,
        "train.checkpoint_every": 100,
        "verify.repeats": 2,
    },
    "8b": {},
    "70b": {
        "select.tokens": 8_000_000,
        "select.domain_tokens": 2_000_000,
        "train.shard": "fsdp",
        "train.micro_batch": 1,
    },
}
LARGEST = {"small": 4 << 30, "8b": 80 << 30}
"""Bytes of weights up to which a profile is meant: 2 B and 40 B parameters in bfloat16."""


def profile_of(target: Path) -> str:
    """The profile for the target in this folder; small without one, as the built-in target is."""
    files = [path for path in target.glob("[!.]*.safetensors") if path.is_file()]
    # Mistral publishes the weights a second time, in one file of its own format.
    files = [path for path in files if not path.name.startswith("consolidated")] or files
    size = sum(path.stat().st_size for path in files)
    return next((name for name, largest in LARGEST.items() if size <= largest), "70b")
