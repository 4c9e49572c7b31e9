"""What a request says, read from its raw bytes; only what is needed is decoded.

The body is split into its top-level fields (msgspec: a scan that copies nothing); prompts stay
bytes. Only the few fields below are decoded, so a body of 10 MB costs the event loop a fraction of
what the server's own parsing costs (bench/capture.py).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel

from store.consent import consents
from store.labels import labels
from store.objects import KEYS, PLACES, copies, decode
from store.privacy import answers
from store.shaped_answers import FIELDS, shaped_by

HEADER = b"x-flywheel-"  # ASGI gives header names in lower case
# Content parts that reach the model as something other than the prompt ids of the response.
NOT_TEXT = (
    "image_url",
    "input_image",
    "image_embeds",
    "image_pil",
    "audio_url",
    "input_audio",
    "audio_embeds",
    "video_url",
    "video_embeds",
    "prompt_embeds",
)
# vLLM raises temperatures between 0 and this value to this value.
LOWEST_TEMPERATURE = 0.01

_ESCAPED = re.compile(rb"\\u00[2-7]")  # a field's name may be written with \u escapes
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Sampler(BaseModel):
    """Fields that a record keeps, typed as in vLLM's request models: "0" is 0.0 here as there."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False

    def record(self) -> dict[str, Any]:
        """The fields under their names in a record, with the values that vLLM uses."""
        warm = self.temperature > 0
        return {
            "model": self.model,
            "temperature": max(self.temperature, LOWEST_TEMPERATURE) if warm else 0.0,
            "top_p": self.top_p,
            "top_k": min(self.top_k, 2**31 - 1),  # more than any vocabulary, and fits the table
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "stream": self.stream,
        }


WANTED = (*Sampler.model_fields, *FIELDS, "chat_template_kwargs", "reasoning_effort", "echo")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request for text."""

    fields: dict[str, Any]  # what Sampler and shaped_by read, as the client wrote it
    labels: dict[str, str | None]  # store.labels
    said: bool  # whether the request says anything about consent
    consents: bool
    plain: bool  # whether no echo of the prompt is asked for, and the prompt is text only

    def record(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """What a record says about the request; defaults: the server's sampling parameters.

        Raises pydantic.ValidationError for fields that vLLM refuses as well.
        """
        said = {name: value for name, value in self.fields.items() if value is not None}
        effort = said.get("reasoning_effort")  # vLLM derives from it whether to think
        thinking = None if effort is None else effort != "none"
        thinking = said.get("chat_template_kwargs", {}).get("enable_thinking", thinking)
        return Sampler.model_validate({**defaults, **said}).record() | {
            "shaped": shaped_by(self.fields, defaults),
            **self.labels,
            "consent": True if self.said else None,
            "thinking": None if thinking is None else bool(thinking),
        }


def read(
    headers: Iterable[tuple[bytes, bytes]], body: bytes, text_only: bool = False
) -> Asked | None:
    """The request; None for a body that is no JSON object or an empty one: vLLM refuses it as well.

    text_only: the server refuses pictures and the like, so messages need not be searched for them.
    Raises ValueError or RecursionError for an object that cannot be decoded.
    """
    if not body.lstrip().startswith(b"{"):
        return None
    raw = _fields.decode(body)
    if not raw:
        return None
    fields = {name: msgspec.json.decode(raw[name]) for name in WANTED if name in raw}
    spoken = _spoken(raw, body)
    told = [
        (name.decode("latin-1")[len(HEADER) :], _text(value))
        for name, value in headers
        if name.startswith(HEADER)
    ]
    said = answers(spoken) + [value for name, value in told if name == "consent"]
    metadata = [one for one in copies(spoken.get("metadata")) if isinstance(one, dict)]
    return Asked(
        fields=fields,
        # Headers win over metadata, the last copy over the others.
        labels=labels([*(pair for one in metadata for pair in one.items()), *told]),
        said=any(value is not None for value in said),
        consents=consents(*said),
        plain=not fields.get("echo") and (text_only or _is_text(raw)),
    )


def with_token_ids(body: bytes) -> bytes:
    """The same JSON object with `return_token_ids` set; it must not be empty.

    The name is appended: of equal names the last counts, whatever the client wrote before.
    """
    end = len(body.rstrip()) - 1
    return b"".join((memoryview(body)[:end], b',"return_token_ids":true}'))


def _is_text(raw: dict[str, msgspec.Raw]) -> bool:
    """Whether all of the prompt reaches the model as token ids."""
    messages = bytes(raw.get("messages", b""))
    parts = any(b'"%s"' % kind.encode() in messages for kind in NOT_TEXT)
    return not parts and "prompt_embeds" not in raw


def _spoken(raw: dict[str, msgspec.Raw], body: bytes) -> dict[Any, Any]:
    """The members of the body that may speak of consent or hold labels.

    A name may stand there more than once, and any copy of it may hold a no. Then the whole body is
    decoded, which takes longer.
    """
    names = [name for name in raw if name.lower() in KEYS or name.lower() in PLACES]
    if not names:
        return {}
    twice = any(body.count(b'"%s"' % name.encode()) > 1 for name in names)
    if _ESCAPED.search(body) or (twice and (b'onsent"' in body or b'ONSENT"' in body)):
        whole = decode(body)
        return {name: whole[name] for name in names}
    return {name: decode(bytes(raw[name])) for name in names}


def _text(value: bytes) -> str:
    """A header's value: UTF-8 as clients send it today, else Latin-1 as in older HTTP."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
