"""Prompts of text logs: every turn of a conversation that asks for an answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.base.config import Config
from jobs.base.console import console
from jobs.dataset.chat_rendering import ChatRenderer
from jobs.dataset.database import open_database
from store.log_fields import Refused
from store.place import first_line

QUERY = Path(__file__).with_suffix(".sql").read_text()
ORDERED = "select * exclude (tokens_before, place) from asked order by tokens_before, text_id"
BATCH = 256
"""Conversations whose messages are in memory at a time."""
Row = dict[str, Any]


def text_prompts(cfg: Config, tokens: int) -> list[Row]:
    """A row for each prompt, in the order in which they are answered, within `tokens` of the
    answers that the logs have. It has columns of TEXTS, `count` (how many messages the prompt is),
    and what rows of TRAFFIC have and `regenerate` needs: sample_id, target_id, output_tokens.
    """
    if tokens <= 0 or cfg.table("texts").version() is None:
        return []
    with open_database(cfg, {"texts": None}) as connection:
        connection.execute(QUERY, {"tokens": tokens})
        found = connection.sql(ORDERED).to_arrow_table().to_pylist()
    return [
        row
        | {
            "sample_id": f"{row['text_id']}-{count}",
            "target_id": None,
            "count": count,
            "output_tokens": -(-row["answer_tokens"] // len(row["answers"])),
        }
        for row in found
        for count in row["answers"]
    ]


def with_ids(cfg: Config, rows: list[Row]) -> Iterator[tuple[Row, list[int] | str]]:
    """Each row of `text_prompts` with the ids of its prompt, in their order, or with the reason why
    there are none: "unreadable", "no_template" or "control_text".
    """
    renderer = ChatRenderer(cfg.target_path)
    try:
        renderer.end  # noqa: B018 (reads the tokenizer)
    except (ValueError, Refused) as error:
        console.print(f"note: text logs are left out: {first_line(error)}")
        yield from ((row, "unreadable") for row in rows)
        return
    names = list(dict.fromkeys(row["text_id"] for row in rows))
    by_text: dict[str, list[Row]] = {}
    for row in rows:
        by_text.setdefault(row["text_id"], []).append(row)
    for start in range(0, len(names), BATCH):
        part = names[start : start + BATCH]
        mine = pc.field("text_id").isin(pa.array(part, pa.string()))
        said = cfg.table("texts").read(["text_id", "messages", "tools"], mine).to_pylist()
        texts = {one["text_id"]: one for one in said}
        for row in (row for name in part for row in by_text[name]):
            try:
                yield row, renderer.prompt(row | texts[row["text_id"]], row["count"])
            except Refused as refused:
                control = refused.reason == "control_text"
                yield row, "control_text" if control else "no_template"
