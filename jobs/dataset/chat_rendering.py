"""Messages to the token ids that the target's own chat template and tokenizer make of them.

The prompt of an answer is what serving renders: the messages before it and the beginning of the
answer. An answer's tokens are its text, as the template writes it behind that prompt, encoded by
itself. So spans follow from the messages, and no marker is searched for in a text.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from store.log_fields import Refused

Row = dict[str, Any]
MARK = "\ue000"  # for private use: no template changes it
FINISHED = (None, "stop", "tool_calls", "function_call")
"""Finish reasons of answers that end in an end of turn. Others were cut off."""


class ChatRenderer:
    """The tokenizer and chat template of a target folder, loaded where they are first needed."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def tokenizer(self) -> Any:
        """Raises ValueError if the folder has none, or no chat template."""
        from transformers import AutoTokenizer  # as in dflash/target_model.py

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:
            raise ValueError(f"{self.folder}: this tokenizer cannot be read: {error}") from error
        if not tokenizer.chat_template:
            raise ValueError(
                f"{self.folder}: this tokenizer has no chat template, so text logs cannot be "
                "rendered for it: add its chat_template.jinja, or leave text logs out"
            )
        return tokenizer

    @cached_property
    def end(self) -> tuple[str, list[int]]:
        """What the template writes behind an answer, and the id of it that ends the turn."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        text = self._render(turns, None, None, False).rpartition(MARK)[2]
        return text, [i for i in self._ids(text)[:1] if i in self.tokenizer.all_special_ids]

    def prompt(self, text: Row, count: int) -> list[int]:
        """Ids of the prompt that the first `count` messages of a row of TEXTS are. Raises Refused
        where the template does not take them, or a message holds a control token.
        """
        messages, tools = self._read(text)
        return self._ids(self._render(messages[:count], tools, text["thinking"], True))

    def answers(self, text: Row) -> Iterator[tuple[list[int], list[int], str | None]]:
        """(prompt ids, output ids, finish reason) of each answer in a row of TEXTS; as `prompt`."""
        messages, tools = self._read(text)
        end, end_ids = self.end
        for count in text["answers"]:
            if count == len(messages):
                continue  # a question without an answer
            last = text["finish_reason"] if count == len(messages) - 1 else None
            prompt = self._render(messages[:count], tools, text["thinking"], True)
            whole = self._render(messages[: count + 1], tools, text["thinking"], False)
            if not whole.startswith(prompt) or not whole.endswith(end):
                raise Refused("template", "an answer is not behind its prompt")
            output = self._ids(whole[len(prompt) : len(whole) - len(end)])
            yield self._ids(prompt), output + (end_ids if last in FINISHED else []), last

    def _read(self, text: Row) -> tuple[list[Row], Any]:
        messages = json.loads(text["messages"])
        tools = json.loads(text["tools"]) if text["tools"] else None
        for message in messages:
            said = message["content"] + message.get("reasoning_content", "")
            if any(token in said for token in self.tokenizer.all_special_tokens):
                raise Refused("control_text")
            for call in message.get("tool_calls", []):  # templates want objects, as vLLM gives them
                try:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
                except ValueError:
                    raise Refused("template", "arguments of a tool call are no JSON") from None
            if "reasoning_content" in message:
                message["reasoning"] = message["reasoning_content"]  # vLLM gives both names
        return messages, tools

    def _render(self, messages: list[Row], tools: Any, thinking: bool | None, ask: bool) -> str:
        mode = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=ask, **mode
            )
        except Exception as error:
            raise Refused("template", error) from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
