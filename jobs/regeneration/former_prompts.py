"""Which prompts are answered anew, and as what they are sent to the present target."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash.identity import legacy_target_id, target_id
from jobs.base.config import Config
from jobs.base.console import console
from jobs.dataset.database import open_database
from jobs.regeneration.chats import Chats
from jobs.regeneration.kept_tokenizers import kept, renders_alike
from jobs.regeneration.text_prompts import with_ids
from serving.client import Request
from store.place import first_line
from store.shaped_answers import NEUTRAL
from store.traffic_table import tokens_of

QUERY = Path(__file__).with_suffix(".sql").read_text()
ORDERED = "select * exclude (tokens_before, place) from former order by tokens_before, sample_id"
LEFT_OUT = {
    "no_tokenizer": "the tokenizer of the target that they were for was not kept, or cannot be "
    "read: name a copy of its folder in regenerate.former",
    "no_chat": "the messages of the prompt cannot be told for certain (tools, a date, a template "
    "that changes them), and the present template is another",
    "too_long": "the prompt fills serve.max_model_len",
    "unreadable": "the tokenizer of the target cannot be read, or has no chat template",
    "no_template": "the target's chat template does not take the messages of a text log",
    "control_text": "a message of a text log holds the text of a control token of the target",
    "refused": "the server refused the request",
    "empty": "the answer has no token",
}
"""Why a prompt was not answered anew -> what that means."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
PLAIN = {name: NEUTRAL[name][0] for name in PENALTIES}
"""The target's plain choice of tokens, whatever its generation_config.json says."""
LOOP_TOKENS, LOOP_TIMES = 64, 8
LOOPS = {"min_pattern_size": 4, "max_pattern_size": LOOP_TOKENS, "min_count": LOOP_TIMES}
"""vLLM's repetition_detection: it ends an answer that repeats up to so many tokens so often. With
fewer than 4 tokens, the rule of a table would be a loop."""

Row = dict[str, Any]


def former_prompts(cfg: Config) -> list[Row]:
    """TRAFFIC rows (narrow columns) of the prompts of former targets, in the order in which they
    are answered anew, within regenerate.tokens. Without those that production has answered with the
    present target meanwhile.
    """
    ours = [target_id(cfg.target_path), legacy_target_id(cfg.target_path)]
    if not cfg.regenerate.tokens or cfg.table("traffic").version() is None:
        return []
    with open_database(cfg, {"traffic": None}) as connection:
        connection.execute(QUERY, {"ours": ours, "tokens": cfg.regenerate.tokens})
        return connection.sql(ORDERED).to_arrow_table().to_pylist()


class Asking:
    """Turns rows of former targets into requests to the present one. `left_out` has the samples of
    those that cannot be one, with the reason (of LEFT_OUT).
    """

    def __init__(self, cfg: Config, identities: Iterable[str | None]):
        self.cfg = cfg
        self.left_out: dict[str, str] = {}
        self.chats: dict[str | None, Chats | None] = {}
        """By target; None where its prompts are those of the present target. Targets whose
        tokenizer is not there are missing.
        """
        for identity in sorted(name for name in {*identities} if name is not None):
            folder = kept(cfg, identity)
            if folder is not None and renders_alike(folder, cfg.target_path):
                self.chats[identity] = None
            elif folder is not None and (tokenizer := _tokenizer(folder)) is not None:
                self.chats[identity] = Chats(tokenizer)

    def requests(self, rows: list[Row]) -> Iterator[tuple[Row, Request]]:
        """(row, request) of those that can be asked again: those of former targets, then those of
        text logs, each in their order.
        """
        texts = [row for row in rows if row["target_id"] is None]
        former = [row for row in rows if row["target_id"] is not None]
        names = pa.array(sorted(row["sample_id"] for row in former), pa.string())
        ids = {
            row["sample_id"]: row["prompt_ids"]
            for batch in tokens_of(self.cfg.table("traffic"), names, ["prompt_ids"])
            for row in batch.to_pylist()
        }
        prompts = ((row, ids.get(row["sample_id"], [])) for row in former)
        for row, prompt in chain(prompts, with_ids(self.cfg, texts)):
            request = self._request(row, prompt)
            if isinstance(request, str):
                self.left_out[row["sample_id"]] = request
            else:
                yield row, request

    def _request(self, row: Row, ids: list[int] | str) -> Request | str:
        """The request, or why there is none; `ids` may say so already."""
        if isinstance(ids, str):
            return ids
        if row["target_id"] not in self.chats and row["target_id"] is not None:
            return "no_tokenizer"
        room = self.cfg.serve.max_model_len - len(ids)
        if room < 2:
            return "too_long"
        chats, thinking = self.chats.get(row["target_id"]), row["thinking"]
        prompt: Any = ids if chats is None else chats.messages_of(ids, thinking)
        if not prompt:
            return "no_chat"
        sampler = sampler_of(self.cfg, row)
        extra: Row = PLAIN | {"repetition_detection": LOOPS}
        extra |= {name: sampler[name] for name in ("top_p", "top_k")}
        if chats is not None and thinking is not None:
            extra["chat_template_kwargs"] = {"enable_thinking": thinking}
        return Request(
            prompt=prompt,
            max_tokens=min(room, self.cfg.regenerate.max_tokens),
            temperature=sampler["temperature"],
            seed=sampler["seed"],
            extra=extra,
        )


def sampler_of(cfg: Config, row: Row) -> Row:
    """temperature, top_p, top_k and seed that a prompt is answered with: regenerate.sampler."""
    if cfg.regenerate.sampler == "greedy" or not row["temperature"]:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}
    kept_values = {"top_p": row["top_p"] or 1.0, "top_k": row["top_k"] or 0, "seed": row["seed"]}
    return {"temperature": row["temperature"], **kept_values}


def _tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a former target; None if it cannot be read, so that others go on."""
    from transformers import AutoTokenizer  # as in dflash/target_model.py

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 (a tokenizer raises what it likes)
        console.print(f"note: {folder}: this tokenizer cannot be read: {first_line(error)}")
        return None
