"""From finished exchanges to JSON lines, in one thread behind a queue of bounded bytes."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from store.served_rounds import ROUNDS, are_of

MAX_QUEUE_BYTES = 256 << 20
WARN_SECONDS = 60.0
logger = logging.getLogger("vllm.flywheel.capture")


class Choice(msgspec.Struct):
    """One choice of an answer, or a part of it in a stream."""

    index: int = 0
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class Usage(msgspec.Struct):
    """vLLM's own count of output tokens, over all choices."""

    completion_tokens: int | None = None


class Answer(msgspec.Struct):
    """The fields that are read of a response, or of one event of a stream; others are skipped."""

    id: str | None = None
    prompt_token_ids: list[int] | None = None
    choices: list[Choice] = []
    usage: Usage | None = None


_answer = msgspec.json.Decoder(Answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What is known of one request, and the raw bytes of its answer."""

    record: dict[str, Any]  # what the records of all its choices share
    chunks: list[bytes]
    complete: bool  # False: the client went away
    rounds: Mapping[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """(accepted, drafted) by choice, where they are known."""


class OncePerMinute:
    """Limits a message that every request could cause to one a minute, with a count."""

    def __init__(self) -> None:
        self._next, self._unsaid = 0.0, 0

    def due(self) -> int:
        """How often it happened since the last message, now included; 0 if it is too early."""
        self._unsaid += 1
        if time.monotonic() < self._next:
            return 0
        self._next = time.monotonic() + WARN_SECONDS
        said, self._unsaid = self._unsaid, 0
        return said


class Writer:
    """Appends the records of exchanges to one file; calls `count(outcome, n)` with what became of
    each.

    Outcomes: written (lines), dropped (queue full), no_ids (a choice without token ids),
    ids_incomplete (fewer or more ids than tokens that vLLM counted), not_written (the file system
    refused: full, read-only, gone), failed (a fault of ours).
    """

    def __init__(self, path: Path, count: Callable[[str, int], None]) -> None:
        self.path = path
        self.count = count
        self._torn = False
        self._waiting: deque[tuple[Exchange, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._full, self._refused, self._faulty = (OncePerMinute() for _ in range(3))
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def put(self, exchange: Exchange, size: int) -> None:
        """Queue an exchange of `size` bytes; dropped and counted if there is no room."""
        with self._changed:
            if self._closed or self._bytes + size > MAX_QUEUE_BYTES:
                self.count("dropped", 1)
                if times := self._full.due():
                    logger.warning("the capture's queue is full: %d answers dropped", times)
                return
            self._waiting.append((exchange, size))
            self._bytes += size
            self._changed.notify()

    def close(self) -> None:
        """Write what is queued and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        for exchange, size in self._exchanges():
            try:
                self._write(exchange)
            except Exception:  # one bad exchange must not end the capture
                self.count("failed", 1)
                if times := self._faulty.due():
                    logger.exception("capture failed %d times", times)
            with self._changed:
                self._bytes -= size

    def _exchanges(self) -> Iterator[tuple[Exchange, int]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                item = self._waiting.popleft()
            yield item

    def _write(self, exchange: Exchange) -> None:
        rows, tokens = records(exchange)
        usable = [row for row in rows if row["prompt_ids"] and row["output_ids"]]
        self.count("no_ids", len(rows) - len(usable))
        if tokens not in (None, sum(len(row["output_ids"]) for row in usable)) and usable:
            self.count("ids_incomplete", len(usable))
            return
        try:
            self._append(b"".join(msgspec.json.encode(row) + b"\n" for row in usable))
            self.count("written", len(usable))
        except OSError as error:
            self.count("not_written", len(usable))
            if times := self._refused.due():
                logger.warning("captured answers lost: %d, %s", times, error)

    def _append(self, lines: bytes) -> None:
        """Append whole lines or nothing: if the disk fills up, a written part is cut off again."""
        if not lines:
            return
        # Opened for each exchange: the file, or its folder, may have been moved away.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as stream:
            end = stream.tell()
            rest = memoryview(b"\n" + lines if self._torn else lines)
            self._torn = True
            try:
                while rest:
                    rest = rest[stream.write(rest) :]
            except OSError:
                _cut(stream, end)
                self._torn = False
                raise
            self._torn = False


def _cut(stream: FileIO, end: int) -> None:
    stream.truncate(end)


def records(exchange: Exchange) -> tuple[list[dict[str, Any]], int | None]:
    """(one record per choice, vLLM's count of output tokens over all of them if it was sent).

    A choice without a finish reason gets `abort`: its client went away. `accepted` and `drafted`
    are null where the rounds are not known, or do not make up the tokens that the client got.
    """
    name, prompt, tokens = None, None, None
    choices: dict[int, Choice] = {}
    for part in _parts(exchange):
        name = part.id or name
        prompt = part.prompt_token_ids or prompt
        # In a stream, usage may come with every choice; it then counts that choice alone.
        if part.usage is not None and not (exchange.record["stream"] and part.choices):
            tokens = part.usage.completion_tokens
        for choice in part.choices:
            _merge(choices, choice)
    rows = [
        exchange.record
        | _rounds(exchange, index, choice)
        | {
            "request_id": name,
            "choice": index,
            "prompt_ids": choice.prompt_token_ids or prompt,
            "output_ids": choice.token_ids,
            "finish_reason": choice.finish_reason or "abort",
            "stop_reason": choice.stop_reason,
        }
        for index, choice in sorted(choices.items())
    ]
    return rows, tokens


def _rounds(exchange: Exchange, index: int, choice: Choice) -> dict[str, Any]:
    accepted, drafted = exchange.rounds.get(index, ([], []))
    known = index in exchange.rounds and are_of(accepted, drafted, len(choice.token_ids or []))
    return {"accepted": accepted, "drafted": drafted} if known else dict.fromkeys(ROUNDS)


def _merge(choices: dict[int, Choice], part: Choice) -> None:
    choice = choices.setdefault(part.index, Choice(part.index, token_ids=[]))
    assert choice.token_ids is not None
    choice.token_ids += part.token_ids or []
    for name in ("prompt_token_ids", "finish_reason", "stop_reason"):
        if getattr(part, name) is not None:
            setattr(choice, name, getattr(part, name))


def _parts(exchange: Exchange) -> Iterator[Answer]:
    """The parts of an answer. A response without streaming is one part, or none if cut off."""
    body = b"".join(exchange.chunks)
    if not exchange.record["stream"]:
        if exchange.complete:
            yield _answer.decode(body)
        return
    events = body.split(b"\n\n")
    for event in events[:-1]:  # after the last separator: nothing, or an event cut by an abort
        data = event.removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield _answer.decode(data)
