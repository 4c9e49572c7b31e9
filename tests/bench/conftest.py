"""The tiny models of tests/dflash, used here for sampled rounds."""

from tests.dflash.conftest import (  # noqa: F401
    config,
    drafter,
    dtype,
    pair,
    pytest_generate_tests,
    samples,
    target,
    target_folder,
    trained,
)
