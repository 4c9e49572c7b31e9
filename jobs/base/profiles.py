"""Defaults that depend on how large the target is.

The sections hold the defaults for a target of about 8 B parameters. A profile replaces those that
another size needs. A config file and the command line replace both.
docs/how-to/settings.md has the table with the source of each value.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from store.place import place_of

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


def profile_of(target: Path | str) -> str:
    """The profile for the target in this folder or bucket; small without one, as the built-in
    target is. A bucket is asked for sizes: nothing is copied for them.
    """
    if "://" in str(target):
        found = [(item.name, item.size) for item in place_of(str(target)).objects()]
    else:
        found = [(p.name, p.stat().st_size) for p in Path(target).glob("*") if p.is_file()]
    sizes = {n: size for n, size in found if fnmatch(n, "[!.]*.safetensors") and "/" not in n}
    # Mistral publishes the weights a second time, in one file of its own format.
    sizes = {n: size for n, size in sizes.items() if not n.startswith("consolidated")} or sizes
    total = sum(sizes.values())
    return next((name for name, largest in LARGEST.items() if total <= largest), "70b")
