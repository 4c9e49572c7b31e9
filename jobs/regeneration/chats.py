"""From the token ids of a prompt back to its chat messages.

A chat template is a program, and nothing inverts those. But most of them put fixed text around each
message. So these texts are found by rendering messages whose content is known, the prompt is cut at
them, and what comes out counts only if rendering it again gives the prompt, id by id.
"""

import re
from dataclasses import dataclass
from itertools import cycle
from typing import Any

Message = dict[str, str]
# Private-use characters: no prompt has them, and no template changes them.
MARKS = {role: f"\ue000{role}\ue001" for role in ("system", "user", "assistant", "last")}


@dataclass(frozen=True, slots=True)
class Around:
    """The fixed texts around messages: before the first user message, between messages, after the
    last one. `system` is what stands before a system message; None: there is none.
    """

    system: str | None
    user: str
    to_assistant: str
    to_user: str
    end: str


class Chats:
    """The chat template of a former target, read backwards."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.around = {mode: self._learn(mode) for mode in (None, True, False)}

    def messages_of(self, ids: list[int], thinking: bool | None) -> list[Message] | None:
        """The messages that this prompt was rendered from; None if they cannot be found for
        certain, as with tools or a date in the prompt. `thinking`: enable_thinking of the request.
        """
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        for texts in self.around[thinking]:
            messages = _cut(texts, text)
            if messages and self._render(messages, thinking, return_dict=False) == ids:
                return messages
        return None

    def _learn(self, thinking: bool | None) -> list[Around]:
        found = []
        for roles in (["user", "assistant", "last"], ["system", "user", "assistant", "last"]):
            chat = [
                {"role": role.replace("last", "user"), "content": MARKS[role]} for role in roles
            ]
            text = self._render(chat, thinking, tokenize=False)
            parts = re.split("|".join(MARKS[role] for role in roles), text or "")
            if len(parts) == len(roles) + 1:
                system = parts.pop(0) if len(roles) == 4 else None
                found.append(Around(system, *parts))
        return found

    def _render(self, messages: list[Message], thinking: bool | None, **how: bool) -> Any:
        """None if the template refuses these messages."""
        mode = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, **mode, **how
            )
        except Exception:  # noqa: BLE001 (a template raises what it likes, some for a system role)
            return None


def _cut(texts: Around, text: str) -> list[Message] | None:
    """Messages between these texts; None where the text does not begin, alternate and end so."""
    if not text.endswith(texts.end):
        return None
    rest = text.removesuffix(texts.end)
    messages: list[Message] = []
    if texts.system is not None:
        if not rest.startswith(texts.system):
            return None
        system, _, rest = rest.removeprefix(texts.system).partition(texts.user)
        messages.append({"role": "system", "content": system})
    elif not rest.startswith(texts.user):
        return None
    else:
        rest = rest.removeprefix(texts.user)
    turns = (("user", texts.to_assistant), ("assistant", texts.to_user))
    for role, following in cycle(turns):
        content, found, rest = rest.partition(following)
        messages.append({"role": role, "content": content})
        if not found:
            return messages if role == "user" else None
    return None
