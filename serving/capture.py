"""ASGI middleware that records served traffic as token ids, beside any vLLM server.

    FLYWHEEL_CAPTURE_DIR=captured vllm serve MODEL --middleware serving.capture.Capture

Every choice of /v1/chat/completions and /v1/completions becomes one JSON line; no text is kept.
The request is changed in one way: `return_token_ids` is set, so clients see token ids they may not
have asked for. Responses pass through as they are, streams unbuffered. Parsing and writing happen
in a thread behind a queue of bounded bytes; when it is full, records are dropped and counted, and
nothing that fails here reaches a request. Counts by outcome: `flywheel_capture_total` in /metrics.

Environment: FLYWHEEL_CAPTURE_DIR; FLYWHEEL_CAPTURE_SAMPLE, the share of conversations kept
(default 1); FLYWHEEL_CAPTURE_TARGET_ID and FLYWHEEL_CAPTURE_DRAFTER, copied into the records.
Headers: X-Flywheel-Conversation, -Domain, -Tenant, -Language, -Consent (or the same names in the
body's `metadata`). Consent "false", "no" or "0" means: not recorded.
"""

import contextlib
import json
import logging
import os
import socket
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from serving.capture_writer import Exchange, Writer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
LABELS = ("conversation", "domain", "language", "tenant", "consent")
MAX_RESPONSE_BYTES = 64 << 20
REFUSALS = {"false", "no", "0"}

OUTCOMES = Counter(
    "flywheel_capture", "Traffic capture: requests and records by outcome", ["outcome"]
)
logger = logging.getLogger("vllm.flywheel.capture")


class Capture:
    """See the module. Raises ValueError at start-up for a missing or unusable folder."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.sample = _share(os.environ.get("FLYWHEEL_CAPTURE_SAMPLE", "1"))
        self.writer = Writer(_new_file(os.environ.get("FLYWHEEL_CAPTURE_DIR", "")), _count)
        self.constants = {
            "target_id": os.environ.get("FLYWHEEL_CAPTURE_TARGET_ID") or None,
            "drafter": os.environ.get("FLYWHEEL_CAPTURE_DRAFTER") or None,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; the end of the application's life ends the writer."""
        if scope["type"] == "lifespan":
            try:
                await self.app(scope, receive, send)
            finally:
                self.writer.close()
        elif _is_captured(scope):
            await self._serve(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = await _read_body(receive)
        request = _parse(messages)
        labels = _labels(scope, request) if request is not None else {}
        if request is None or not self._wants(labels):
            await self.app(scope, _replay(messages, receive), send)
            return
        scope, messages = _with_token_ids(scope, request)
        recorder = _Recorder(send)
        try:
            await self.app(scope, _replay(messages, receive), recorder)
        finally:
            with _never_raising():
                self._submit(scope, request, labels, recorder)

    def _wants(self, labels: dict[str, str | None]) -> bool:
        if (labels["consent"] or "").lower() in REFUSALS:
            _count("no_consent")
            return False
        conversation = labels["conversation"] or os.urandom(8).hex()
        kept = zlib.crc32(conversation.encode()) < self.sample * 2**32
        if not kept:
            _count("not_sampled")
        return kept

    def _submit(
        self,
        scope: Scope,
        request: dict[str, Any],
        labels: dict[str, str | None],
        recorder: "_Recorder",
    ) -> None:
        if recorder.status != 200:
            _count("not_ok")
        elif recorder.size > MAX_RESPONSE_BYTES:
            _count("dropped")
        else:
            exchange = Exchange(
                captured_at=datetime.now(UTC).isoformat(),
                endpoint=scope["path"],
                request=request,
                labels=labels,
                constants=self.constants | {"adapter": _adapter(scope, request)},
                defaults=_sampling_defaults(scope),
                chunks=recorder.chunks,
                complete=recorder.complete,
            )
            if not self.writer.put(exchange, recorder.size):
                logger.warning("capture queue is full: a record is dropped")


class _Recorder:
    """`send` that keeps references to the body's chunks while passing every message on."""

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


def _is_captured(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in ENDPOINTS


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


def _parse(messages: list[Message]) -> dict[str, Any] | None:
    """The request as a dict; None for whatever the server will refuse anyway."""
    try:
        request = json.loads(b"".join(message.get("body", b"") for message in messages))
    except ValueError:
        return None
    return request if isinstance(request, dict) else None


def _with_token_ids(scope: Scope, request: dict[str, Any]) -> tuple[Scope, list[Message]]:
    body = json.dumps(request | {"return_token_ids": True}).encode()
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return {**scope, "headers": headers}, [{"type": "http.request", "body": body}]


def _labels(scope: Scope, request: dict[str, Any]) -> dict[str, str | None]:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    metadata = request.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    found = {name: headers.get(f"x-flywheel-{name}", metadata.get(name)) for name in LABELS}
    return {name: None if value is None else str(value) for name, value in found.items()}


def _adapter(scope: Scope, request: dict[str, Any]) -> str | None:
    """The LoRA adapter that vLLM serves under the requested model name, if it is one."""
    models = getattr(getattr(scope.get("app"), "state", None), "openai_serving_models", None)
    name = request.get("model")
    return name if name in getattr(models, "lora_requests", {}) else None


def _sampling_defaults(scope: Scope) -> dict[str, Any]:
    """What vLLM samples with where a request is silent (the model's generation_config.json)."""
    chat = getattr(getattr(scope.get("app"), "state", None), "openai_serving_chat", None)
    return dict(getattr(chat, "default_sampling_params", {}))


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(f"FLYWHEEL_CAPTURE_SAMPLE={text}: must be a share between 0 and 1")
    return share


def _new_file(folder: str) -> Path:
    """A name of this process's own below `folder`, which is created."""
    if not folder:
        raise ValueError("FLYWHEEL_CAPTURE_DIR is not set: name the folder for captured traffic")
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"FLYWHEEL_CAPTURE_DIR={folder}: no permission to write there")
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    return Path(folder) / f"{started}-{socket.gethostname()}-{os.getpid()}.jsonl"


def _count(outcome: str, amount: int = 1) -> None:
    OUTCOMES.labels(outcome).inc(amount)


@contextlib.contextmanager
def _never_raising() -> Any:
    """A fault of the capture is logged and counted; the request it happened in goes on."""
    try:
        yield
    except Exception:  # whatever it is, a served request comes first
        _count("failed")
        logger.exception("capture failed")
