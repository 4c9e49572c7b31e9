"""Where a drafter fails longest: stretches of rounds that accepted nothing, with masked text.

Traffic is stored as it was served, so its token ids can be decoded to what people wrote. A page is
passed on to more people than the store. So of the text around such a stretch only common words are
shown: those without a digit that the answers of several conversations write in lower case. All
others become asterisks. Names may be shared by many conversations, but not in lower case.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.base.config import Config
from jobs.dataset.samples import selected, with_tokens
from jobs.evaluation.intervals import FEWEST

SHOWN, BEFORE, AFTER = 6, 24, 8
"""Examples on a page; tokens that are shown before and after a stretch."""
LOOKED_AT = 2000
"""Answers that decide which words are common: the first in the order of a hash, a random choice."""

WORD = re.compile(r"\w+")
Row = dict[str, Any]
Stretch = tuple[int, int]
"""Half-open span of the output tokens that came from rounds without an accepted draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Masked text around tokens [start, end) of an answer, each of which took its own round."""

    domain: str
    start: int
    end: int
    before: str
    failed: str
    after: str


def worst_contexts(cfg: Config, target: str, version: str, k: int) -> list[Example] | None:
    """The longest stretch of each of the worst conversations, in greedy replay with `k` drafts.

    None if the target folder has no tokenizer.json.
    """
    if not (cfg.target_path / "tokenizer.json").is_file():
        return None
    # Imported late, as in dflash/target_model.py. AutoTokenizer would import all of generation.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(cfg.target_path, local_files_only=True)
    chosen = _worst(_greedy_replay(cfg, target, version, k))
    rows = selected(cfg)
    common = common_words(
        (row["conversation_id"], _text(tokenizer, row["output_ids"]))
        for row in _answers(cfg, rows.slice(0, LOOKED_AT), "conversation_id")
    )
    names = pa.array([row["sample_id"] for row, _ in chosen], pa.string())
    asked = rows.filter(pc.field("sample_id").isin(names))
    outputs = {row["sample_id"]: row["output_ids"] for row in _answers(cfg, asked)}
    return [
        _example(tokenizer, common, row["domain"], outputs[row["sample_id"]], stretch)
        for row, stretch in chosen
        if row["sample_id"] in outputs
    ]


def _answers(cfg: Config, rows: pa.Table, *columns: str) -> list[Row]:
    batches = with_tokens(cfg, rows, ["output_ids", *columns])
    return [row for batch in batches for row in batch.to_pylist()]


def longest_stretch(accepted: Sequence[int]) -> Stretch:
    """Output tokens of the longest run of rounds that accepted nothing; (1, 1) if there is none.

    The last round does not count: the end of the answer may have cut it. Output token 0 comes from
    the prefill. Example: in [2, 0, 0, 1] the first round gives tokens 1..3, so the result is
    (4, 6).
    """
    best, start, at = (1, 1), 1, 1
    for count in accepted[:-1]:
        at += count + 1
        if count:
            start = at
        elif at - start > best[1] - best[0]:
            best = (start, at)
    return best


def common_words(answers: Iterable[tuple[str, str]]) -> set[str]:
    """Lower-case words without digits that answers of at least FEWEST conversations have.

    answers: (conversation, text).
    """
    seen: dict[str, set[str]] = {}
    for conversation, text in answers:
        seen.setdefault(conversation, set()).update(WORD.findall(text))
    counts = Counter(word for words in seen.values() for word in words)
    return {word for word, n in counts.items() if n >= FEWEST and _plain(word)}


def _plain(word: str) -> bool:
    return word == word.lower() and not any(c.isdigit() for c in word)


def masked(text: str, common: set[str]) -> str:
    """The text with each word that is not common replaced by as many asterisks."""

    def shown(word: re.Match[str]) -> str:
        return word[0] if word[0].lower() in common else "*" * len(word[0])

    return WORD.sub(shown, text)


def _greedy_replay(cfg: Config, target: str, version: str, k: int) -> list[Row]:
    mine = (pc.field("drafter_version") == version) & (pc.field("target_id") == target)
    mine &= (pc.field("origin") == "replay") & (pc.field("k") == k)
    mine &= pc.field("temperature") == 0.0
    columns = ["sample_id", "conversation_id", "domain", "accepted"]
    return cfg.table("acceptance").read(columns, mine).to_pylist()


def _worst(rows: Iterable[Row]) -> list[tuple[Row, Stretch]]:
    """The SHOWN longest stretches, at most one per conversation."""
    found = [(row, longest_stretch(row["accepted"])) for row in rows]
    found.sort(key=lambda one: (one[1][0] - one[1][1], one[0]["sample_id"]))
    best: dict[str, tuple[Row, Stretch]] = {}
    for row, (start, end) in found:
        if end > start:
            best.setdefault(row["conversation_id"], (row, (start, end)))
    return list(best.values())[:SHOWN]


def _example(
    tokenizer: Any, common: set[str], domain: str, output: list[int], stretch: Stretch
) -> Example:
    """Mask the whole answer first and then cut it at the tokens: so no word is judged by a part."""
    start, end = stretch
    places = (max(0, start - BEFORE), start, end, end + AFTER)
    text = masked(_text(tokenizer, output), common)
    a, b, c, d = (len(_text(tokenizer, output[:place])) for place in places)
    return Example(
        domain=domain, start=start, end=end, before=text[a:b], failed=text[b:c], after=text[c:d]
    )


def _text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
