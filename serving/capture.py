"""ASGI middleware that records served traffic as token ids, beside any vLLM server.

    FLYWHEEL_CAPTURE_DIR=captured vllm serve MODEL --middleware serving.capture.Capture

Every choice of /v1/chat/completions and /v1/completions becomes one JSON line; no text is kept.
The request is changed in one way: `return_token_ids` is set, so clients see token ids that they may
not have asked for. With a tool or reasoning parser, a stream then also has a chunk for tokens that
show no text. Responses pass through as they are, streams unbuffered. What cannot be recorded is
served untouched and counted (OUTCOMES; `flywheel_capture_total` in /metrics).

On the event loop a request costs one scan of its bytes (serving/capture_request.py). Answers are
parsed and written in a thread, behind a queue of bounded bytes. When it is full, records are
dropped and counted. Nothing that fails here reaches a request.

Environment: FLYWHEEL_CAPTURE_DIR; FLYWHEEL_CAPTURE_SAMPLE, the share of conversations kept
(default 1); FLYWHEEL_CAPTURE_TARGET_ID and FLYWHEEL_CAPTURE_DRAFTER, copied into the records.
Headers: X-Flywheel-Conversation, -Domain, -Tenant, -Language, -Consent, or the same names in the
body's `metadata`. A request is not recorded if it says anything about consent that is not a clear
yes (store/consent.py), in any place where ingest would look for it (store/privacy.py).
"""

import contextlib
import logging
import os
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from serving import capture_request
from serving.capture_request import Asked
from serving.capture_writer import Exchange, OncePerMinute, Writer
from store.ids import says_nothing

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
NOT_CAPTURED = (
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/invocations",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Other endpoints of vLLM that generate. Their answers are only counted."""
OUTCOMES = {
    "written": "records",
    "no_consent": "requests whose owner did not agree",
    "not_sampled": "requests outside FLYWHEEL_CAPTURE_SAMPLE",
    "not_captured": "requests to another endpoint, with echo, with pictures, without a JSON object",
    "not_ok": "requests that failed",
    "no_ids": "choices without token ids (hidden reasoning)",
    "ids_incomplete": "choices whose number of token ids is not the one that vLLM counted",
    "dropped": "answers that found the queue full, or were larger than 64 MiB",
    "not_written": "records that the file system refused",
    "failed": "faults of the capture itself",
}
MAX_RESPONSE_BYTES = 64 << 20

_outcomes = Counter(
    "flywheel_capture", "Traffic capture: requests and records by outcome", ["outcome"]
)
for _name in OUTCOMES:  # so that a count of zero is in /metrics, too
    _outcomes.labels(_name)
_faulty = OncePerMinute()
logger = logging.getLogger("vllm.flywheel.capture")


class Capture:
    """The middleware; see the module. Raises ValueError at start-up for a missing or unusable
    folder, or a FLYWHEEL_CAPTURE_SAMPLE outside 0..1.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.sample = _share(os.environ.get("FLYWHEEL_CAPTURE_SAMPLE", "1"))
        self.writer = Writer(_new_file(os.environ.get("FLYWHEEL_CAPTURE_DIR", "")), _count)
        self.constants = {
            "target_id": os.environ.get("FLYWHEEL_CAPTURE_TARGET_ID") or None,
            "drafter": os.environ.get("FLYWHEEL_CAPTURE_DRAFTER") or None,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection. When the application shuts down, the writer is closed."""
        if scope["type"] == "lifespan":
            try:
                await self.app(scope, receive, send)
            finally:
                self.writer.close()
            return
        route = _route(scope)
        if route in ENDPOINTS:
            await self._serve(scope, receive, send, route)
            return
        if route in NOT_CAPTURED:
            _count("not_captured")
        await self.app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, route: str) -> None:
        messages = await _read_body(receive)
        body = b"".join(message.get("body", b"") for message in messages)
        asked = None
        with _never_raising():
            asked = self._wanted(scope, body)
        if asked is None:
            await self.app(scope, _replay(messages, receive), send)
            return
        adapter = _adapter(scope, asked)
        recorder = _Recorder(send)
        scope, messages = _with_token_ids(scope, body)
        try:
            await self.app(scope, _replay(messages, receive), recorder)
        finally:
            with _never_raising():
                self._submit(scope, asked, adapter or _adapter(scope, asked), recorder, route)

    def _wanted(self, scope: Scope, body: bytes) -> Asked | None:
        """The request if it is to be recorded; if not, it is counted and None returned."""
        try:
            asked = capture_request.read(scope["headers"], body, _text_only(scope))
        except (ValueError, RecursionError):
            asked = None
        if asked is not None and not asked.consents:
            _count("no_consent")
        elif asked is None or not asked.plain:
            _count("not_captured")
        elif not _is_sampled(asked.labels["conversation_id"], self.sample):
            _count("not_sampled")
        else:
            return asked
        return None

    def _submit(
        self, scope: Scope, asked: Asked, adapter: str | None, recorder: "_Recorder", route: str
    ) -> None:
        if recorder.status != 200:
            _count("not_ok")
        elif recorder.size > MAX_RESPONSE_BYTES:
            _count("dropped")
        else:
            record = {
                "v": 1,
                "captured_at": datetime.now(UTC).isoformat(),
                "endpoint": route,
                **asked.record(_sampling_defaults(scope)),
                **self.constants,
                "adapter": adapter,
            }
            exchange = Exchange(record=record, chunks=recorder.chunks, complete=recorder.complete)
            self.writer.put(exchange, recorder.size)


class _Recorder:
    """A `send` that passes every message on and keeps references to the chunks of the body."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.status = 0
        self.chunks: list[bytes] = []
        self.size = 0
        self.complete = False

    async def __call__(self, message: Message) -> None:
        await self.send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.size += len(message.get("body", b""))
            if self.size <= MAX_RESPONSE_BYTES:
                self.chunks.append(message.get("body", b""))
            else:
                self.chunks.clear()
            self.complete = not message.get("more_body", False)


def _route(scope: Scope) -> str:
    """The path of a POST as the server's routes know it, "" for everything else.

    A proxy may leave the server's --root-path in front of it; that is removed.
    """
    if scope["type"] != "http" or scope["method"] != "POST":
        return ""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return rest if rest.startswith("/") else path


async def _read_body(receive: Receive) -> list[Message]:
    """The request's messages up to the last part of its body, or up to a disconnect."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def next_message() -> Message:
        message = next(waiting, None)
        return message if message is not None else await receive()

    return next_message


def _with_token_ids(scope: Scope, body: bytes) -> tuple[Scope, list[Message]]:
    body = capture_request.with_token_ids(body)
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return {**scope, "headers": headers}, [{"type": "http.request", "body": body}]


def _state(scope: Scope, name: str) -> Any:
    """What vLLM's server keeps under that name in its state; None for another application."""
    return getattr(getattr(scope.get("app"), "state", None), name, None)


def _adapter(scope: Scope, asked: Asked) -> str | None:
    """The requested model name if vLLM now serves a LoRA adapter under it, else None."""
    name = asked.fields.get("model")
    adapters = getattr(_state(scope, "openai_serving_models"), "lora_requests", {})
    return name if isinstance(name, str) and name in adapters else None


def _text_only(scope: Scope) -> bool:
    """Whether the server takes text only, so that requests need not be searched for other parts."""
    model = getattr(_state(scope, "vllm_config"), "model_config", None)
    return model is not None and not (model.is_multimodal_model or model.enable_prompt_embeds)


def _sampling_defaults(scope: Scope) -> dict[str, Any]:
    """The sampling parameters that vLLM uses where a request sets none, and what it does to every
    choice.

    They come from the model's generation_config.json, --override-generation-config,
    --logits-processors and --tool-strict-level; store.shaped_answers reads them.
    """
    chat = _state(scope, "openai_serving_chat")
    completion = _state(scope, "openai_serving_completion")
    defaults = dict(getattr(chat or completion, "default_sampling_params", {}))
    model = getattr(_state(scope, "vllm_config"), "model_config", None)
    parser = getattr(chat, "parser_cls", None)
    tools = getattr(parser, "tool_parser_cls", None)
    strict = getattr(parser, "tool_strict_level", 0)
    strict = strict or getattr(tools, "default_tool_strict_level", None)
    return defaults | {
        "logits_processors": getattr(model, "logits_processors", None) or None,
        "tool_strict": bool(strict),
    }


def _is_sampled(conversation: str | None, share: float) -> bool:
    """Whether a request is in the sample: the same for all requests of a conversation. Random where
    a request names none, or sends a placeholder such as "None", which is no single conversation.
    """
    named = None if says_nothing(conversation) else conversation
    return zlib.crc32((named or os.urandom(8).hex()).encode()) < share * 2**32


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(f"FLYWHEEL_CAPTURE_SAMPLE={text}: must be a share between 0 and 1")
    return share


def _new_file(folder: str) -> Path:
    """A file of this process alone below `folder`, which is created.

    Raises ValueError if `folder` is not set or not writable.
    """
    if not folder:
        raise ValueError("FLYWHEEL_CAPTURE_DIR is not set: name the folder for captured traffic")
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"FLYWHEEL_CAPTURE_DIR={folder}: no permission to write there")
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    return Path(folder) / f"{started}-{socket.gethostname()}-{os.getpid()}.jsonl"


def _count(outcome: str, amount: int = 1) -> None:
    _outcomes.labels(outcome).inc(amount)


@contextlib.contextmanager
def _never_raising() -> Iterator[None]:
    """A fault of the capture is logged and counted; the request it happened in goes on."""
    try:
        yield
    except Exception:  # whatever it is, a served request comes first
        _count("failed")
        if times := _faulty.due():
            logger.exception("capture failed %d times", times)
