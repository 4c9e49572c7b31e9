"""The rows of a selection: samples merged over all logs, each with the side of its group."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from jobs.base.config import Config
from store.schemas import SELECTION
from store.traffic_table import MERGED, prompts_of, regroup

OFF_POLICY = "reencoded"
"""The ids_source of samples whose token ids were made from text."""


def earlier_sides(cfg: Config, target_id: str) -> dict[str, str]:
    """{sample id: side} of the latest selection of this target."""
    mine = pc.field("target_id") == target_id
    found = cfg.table("selection").read(["sample_id", "split"], mine)
    return dict(zip(found["sample_id"].to_pylist(), found["split"].to_pylist(), strict=True))


def choose(
    cfg: Config,
    target_id: str,
    names: pa.Array,
    earlier: Mapping[str, str],
    version: int | None,
) -> tuple[pa.Table, int, int]:
    """SELECTION rows of these samples in a version of traffic/ (None: the latest), sorted by
    sample_id; how many of them would be on another side without the earlier selection; and how many
    are left out because a drafter must not be judged on text that the target did not write.

    Prompts are read once per sample, and no answers: a sample may stand in any number of logs.
    """
    columns = list(dict.fromkeys([*SELECTION.names, *MERGED, "ids_source"]))
    mine = pc.field("sample_id").isin(names) & (pc.field("target_id") == target_id)
    table = cfg.table("traffic")
    rows = table.read(columns, mine, version)
    prompts = prompts_of(table, rows, version)
    unnamed = {"default", cfg.ingest.default_domain}
    found = regroup(rows, prompts, unnamed, earlier)
    moved = 0
    if earlier:
        free = regroup(rows, prompts, unnamed)["split"]
        moved = pc.sum(pc.not_equal(found["split"], free)).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    source = pc.field("ids_source")
    own = rows.filter(source.is_null() | (source != OFF_POLICY))
    written = pc.field("sample_id").isin(own["sample_id"].combine_chunks())
    kept = found.filter((pc.field("split") == "train") | written)
    return kept.select(SELECTION.names).cast(SELECTION), moved, len(found) - len(kept)
