"""The tiny models of tests/dflash: sampled rounds are judged on them, too."""

from tests.dflash.conftest import (  # noqa: F401
    config,
    drafter,
    dtype,
    samples,
    target,
    target_folder,
    trained,
)
