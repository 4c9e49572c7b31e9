"""ASGI middleware that tells how well drafts are accepted, beside any vLLM server.

    vllm serve MODEL --middleware serving.watch.Watch --per-request-spec-decode-metrics detailed ...

Each answer of /v1/chat/completions and /v1/completions becomes rows of serving.acceptance_feed:
accepted and drafted counts per round, streams and n > 1 too, whatever the client asked for. Neither
requests nor responses change, streams pass unbuffered, and nothing is written to disk.
serving.capture.Capture is this middleware with a file: a server needs one of the two.

Headers: X-Flywheel-Conversation, -Domain, -Tenant, -Language, -Consent, or the same names in the
body's `metadata`. Of a request that says anything about consent that is not a clear yes
(store/consent.py), in any place where ingest would look for it (store/privacy.py), and of one that
cannot be read, rows have counts and times only. Nothing that fails here reaches a request.

Environment: what serving.loaded reads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from dflash.acceptance import traffic_rounds
from serving import acceptance_feed, capture_request, loaded, watched_engine
from serving.acceptance_feed import SWAPPED, Row
from serving.capture_request import Asked
from serving.capture_writer import OncePerMinute
from serving.loaded import Loaded
from serving.watched_engine import Answer, Choice
from store.labels import clean

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_RESPONSE_BYTES = 64 << 20

_faulty = OncePerMinute()
logger = logging.getLogger("vllm.flywheel.watch")


@dataclass(frozen=True, slots=True)
class Served:
    """One request, from its arrival to the end of its answer."""

    route: str
    asked: Asked | None  # None: a body that could not be read
    answer: Answer
    status: int  # of HTTP; 0 if no response began
    complete: bool  # False: the client went away
    drafter: Loaded | None  # None: it changed meanwhile
    k: int
    started_at: float  # unix seconds
    seconds: float
    concurrency: int  # requests in flight at the end, with this one

    def facts(self) -> dict[str, Any]:
        """What all choices have in common; names as in Row."""
        return {
            "started_at": self.started_at,
            "finished_at": self.started_at + self.seconds,
            "first_token_seconds": self.answer.first_token_seconds,
            "drafter_version": None if self.drafter is None else self.drafter.version,
            "drafter_sha256": None if self.drafter is None else self.drafter.sha256,
            "concurrency": self.concurrency,
            "k": self.k,
        }


class Watch:
    """The middleware; see the module."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        route = route_of(scope)
        if route in ENDPOINTS:
            await self._serve(scope, receive, send, route)
        else:
            await self.app(scope, receive, send)

    def recorder(self, scope: Scope, asked: Asked | None, send: Send) -> "Recorder":
        """What takes the response; with `keep`, the request is to be recorded, and asks vLLM for
        token ids.
        """
        return Recorder(send, keep=False)

    def record(self, scope: Scope, served: Served, recorder: "Recorder") -> None:
        """Called at the end of a request that is to be recorded."""

    def fault(self) -> None:
        """Called for a fault of ours, which is logged."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send, route: str) -> None:
        started_at, started = time.time(), time.monotonic()
        messages = await _read_body(receive)
        body = b"".join(message.get("body", b"") for message in messages)
        asked, recorder, drafter = None, Recorder(send, keep=False), loaded.now()
        with self._never_raising():
            asked = read(scope, body)
            recorder = self.recorder(scope, asked, send)
        if recorder.keep:
            scope, messages = _with_token_ids(scope, body)
        self.in_flight += 1
        error: BaseException | None = None
        try:
            with watched_engine.watching(scope) as answer:
                await self.app(scope, _replay(messages, receive), recorder)
        except BaseException as raised:
            error = raised
            raise
        finally:
            concurrency, self.in_flight = self.in_flight, self.in_flight - 1
            with self._never_raising():
                now = loaded.now()
                served = Served(
                    route=route,
                    asked=asked,
                    answer=answer,
                    status=recorder.status,
                    complete=recorder.complete,
                    drafter=drafter if drafter == now else None,
                    k=watched_engine.most_drafts(scope),
                    started_at=started_at,
                    seconds=time.monotonic() - started,
                    concurrency=concurrency,
                )
                _feed(served, error)
            with self._never_raising():
                if recorder.keep:
                    self.record(scope, served, recorder)

    @contextlib.contextmanager
    def _never_raising(self) -> Iterator[None]:
        """A fault of ours is logged and counted; the request it happened in goes on."""
        try:
            yield
        except Exception:  # whatever it is, a served request comes first
            self.fault()
            if times := _faulty.due():
                logger.exception("what is to be known of requests failed %d times", times)


class Recorder:
    """A `send` that passes every message on; with `keep`, it keeps the chunks of the body."""

    def __init__(self, send: Send, keep: bool) -> None:
        self.send = send
        self.keep = keep
        self.status = 0
        self.chunks: list[bytes] = []
        self.size = 0
        self.complete = False
        self.adapter: str | None = None  # under whose name the answer began

    async def __call__(self, message: Message) -> None:
        """Pass one message on."""
        await self.send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
            if self.keep:
                self._keep(message.get("body", b""))

    def _keep(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size <= MAX_RESPONSE_BYTES:
            self.chunks.append(chunk)
        else:
            self.chunks.clear()


def read(scope: Scope, body: bytes) -> Asked | None:
    """What the request says; None for a body that vLLM refuses, or that cannot be read."""
    model = getattr(watched_engine.state(scope, "vllm_config"), "model_config", None)
    # A server that takes text only: requests need not be searched for other parts.
    text_only = model is not None and not (model.is_multimodal_model or model.enable_prompt_embeds)
    try:
        return capture_request.read(scope["headers"], body, text_only)
    except (ValueError, RecursionError):
        return None


def counted(served: Served) -> dict[int, tuple[list[int], list[int]]]:
    """(accepted, drafted) per round of the choices whose rounds are known, cut at their end."""
    searched = served.asked is not None and served.asked.fields.get("use_beam_search")
    if served.answer.broken or searched:  # a beam search asks for each token of each beam
        return {}
    found = {}
    for index, choice in served.answer.choices.items():
        if choice.accepted is not None and choice.drafted is not None:
            with contextlib.suppress(ValueError):  # counts that cannot be of this answer
                steps = choice.accepted, choice.drafted
                found[index] = traffic_rounds(*steps, choice.output_tokens)
    return found


def _feed(served: Served, error: BaseException | None) -> None:
    """Count the request, and give a row for each choice that has ended."""
    outcome = _outcome(served, error)
    if outcome == "":
        return
    label = SWAPPED if served.drafter is None else served.drafter.label
    rounds = counted(served)
    ended = {i: c for i, c in served.answer.choices.items() if c.finish_reason not in ENDLESS}
    if served.answer.broken or outcome == "failed":
        ended = {}
    if outcome == "finished" and served.k and not (ended and ended.keys() <= rounds.keys()):
        outcome = "uncounted"
    acceptance_feed.count(label, outcome)
    for index, choice in sorted(ended.items()):
        if outcome == "aborted" and index not in rounds:
            continue
        acceptance_feed.add(label, _row(served, index, choice, *rounds.get(index, ([], []))))


ENDLESS = (None, "abort", "error")
"""Finish reasons of choices that have not come to an end."""


def _outcome(served: Served, error: BaseException | None) -> str:
    """What became of a request, as in acceptance_feed; "" if the client made a mistake."""
    answer = served.answer
    gone = isinstance(error, asyncio.CancelledError)
    if served.status >= 500 or answer.failed or (error is not None and not gone):
        return "failed"
    if served.status >= 400:
        return ""
    is_whole = all(c.finish_reason not in ENDLESS for c in answer.choices.values())
    is_whole &= bool(answer.choices) or not answer.request_id  # the engine was asked, in vain
    return "finished" if served.complete and is_whole and not gone else "aborted"


def _row(
    served: Served, index: int, choice: Choice, accepted: list[int], drafted: list[int]
) -> Row:
    asked, answer = served.asked, served.answer
    told = asked.labels if asked is not None and asked.consents else {}
    name = choice_name(answer.request_id, index) if told else ""
    return Row(
        seq=0,
        request_id=clean(name) or "",  # a client may choose it, of any length
        seconds=served.seconds,
        domain=told.get("domain"),
        conversation_id=told.get("conversation_id"),
        tenant=told.get("tenant"),
        temperature=answer.temperature,
        accepted=accepted,
        drafted=drafted,
        prompt_tokens=choice.prompt_tokens,
        output_tokens=choice.output_tokens,
        finish_reason=choice.finish_reason or "",
        **served.facts(),
    )


def choice_name(request_id: str, index: int) -> str:
    """The name of a choice in acceptance rows: that of the request for the first one."""
    return f"{request_id}/{index}" if index else request_id


def route_of(scope: Scope) -> str:
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
