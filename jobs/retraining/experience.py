"""What past windows gained: the question sql/gain_of_windows.sql, kept in their rows."""

from jobs.base.config import Config
from jobs.dataset.queries import ask, find_question
from store.windows import Window, Writer

QUESTION = "gain_of_windows"
KEPT = ("served_gain", "requests_before", "requests_after", "why")


def keep_served_gain(cfg: Config, known: list[Window], writer: Writer) -> None:
    """Put what production says now about the latest promoted window into the numbers of its row.

    Called when the next one begins: then its traffic is ingested, and its drafter still serves.
    """
    promoted = [one for one in known if one.state == "promoted"]
    if not promoted:
        return
    last = promoted[-1]
    query = find_question(QUESTION).read_text()
    rows = ask(cfg, query, QUESTION).to_pylist()
    row = next(row for row in rows if row["window"] == last.number)
    found = {name: row[name] for name in KEPT}
    if last.whole["numbers"].get("served") != found:
        last.whole["numbers"]["served"] = found
        writer.write(last)
