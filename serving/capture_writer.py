"""From finished exchanges to JSON lines, in one thread behind a queue of bounded bytes."""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_QUEUE_BYTES = 256 << 20
# vLLM's own defaults where neither the request nor the model's generation config says anything.
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
logger = logging.getLogger("vllm.flywheel.capture")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One request and the raw bytes of its answer."""

    captured_at: str  # ISO 8601, UTC
    endpoint: str
    request: dict[str, Any]
    labels: dict[str, str | None]  # serving.capture.LABELS
    constants: dict[str, str | None]  # target_id, drafter, adapter
    defaults: dict[str, Any]  # sampling parameters of a request that names none
    chunks: list[bytes]
    complete: bool  # False: the client went away


class Writer:
    """Appends the records of exchanges to one file; `count(outcome, n)` hears what became of each.

    Outcomes: written (lines), dropped (queue full), no_ids (an answer without token ids), failed.
    """

    def __init__(self, path: Path, count: Callable[[str, int], None]) -> None:
        self.path = path
        self.count = count
        self._waiting: deque[tuple[Exchange, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def put(self, exchange: Exchange, size: int) -> bool:
        """Queue an exchange of `size` bytes; False (and counted) if there is no room."""
        with self._changed:
            if self._closed or self._bytes + size > MAX_QUEUE_BYTES:
                self.count("dropped", 1)
                return False
            self._waiting.append((exchange, size))
            self._bytes += size
            self._changed.notify()
            return True

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
                logger.exception("capture failed")
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
        rows = list(records(exchange))
        usable = [row for row in rows if row["prompt_ids"] and row["output_ids"]]
        # Opened for each exchange: the bytes are complete lines whenever somebody reads the file.
        with open(self.path, "ab") as stream:
            stream.write(b"".join(json.dumps(row).encode() + b"\n" for row in usable))
        self.count("written", len(usable))
        self.count("no_ids", len(rows) - len(usable))


def records(exchange: Exchange) -> Iterator[dict[str, Any]]:
    """One record per choice. A choice without a finish reason is `abort`: its client went away."""
    request = exchange.request
    answer = _answer(exchange)
    sampling = {name: _sampling(exchange, name) for name in DEFAULTS}
    template = request.get("chat_template_kwargs") or {}
    for index, choice in sorted(answer["choices"].items()):
        yield {
            "v": 1,
            "captured_at": exchange.captured_at,
            "request_id": answer["id"],
            "endpoint": exchange.endpoint,
            "model": request.get("model"),
            "choice": index,
            "prompt_ids": choice["prompt_ids"] or answer["prompt_ids"],
            "output_ids": choice["output_ids"],
            "finish_reason": choice["finish_reason"] or "abort",
            "stop_reason": choice["stop_reason"],
            **sampling,
            "seed": request.get("seed"),
            "max_tokens": request.get("max_completion_tokens") or request.get("max_tokens"),
            "stream": bool(request.get("stream")),
            "conversation_id": exchange.labels["conversation"],
            "domain": exchange.labels["domain"],
            "language": exchange.labels["language"],
            "tenant": exchange.labels["tenant"],
            "consent": exchange.labels["consent"],
            "thinking": template.get("enable_thinking"),
            **exchange.constants,
            "spec": answer["spec"],
        }


def _sampling(exchange: Exchange, name: str) -> Any:
    value = exchange.request.get(name)
    return exchange.defaults.get(name, DEFAULTS[name]) if value is None else value


def _answer(exchange: Exchange) -> dict[str, Any]:
    """{id, prompt_ids, spec, choices: {index: ...}} merged from all parts of the response.

    A whole response is a stream of one part. `spec` is null for streams whose client did not ask
    for usage (vLLM puts the metrics there) and for n > 1.
    """
    answer: dict[str, Any] = {"id": None, "prompt_ids": None, "spec": None, "choices": {}}
    for part in _parts(exchange):
        answer["id"] = part.get("id", answer["id"])
        answer["prompt_ids"] = part.get("prompt_token_ids") or answer["prompt_ids"]
        answer["spec"] = (part.get("metrics") or {}).get("speculative_decoding") or answer["spec"]
        for choice in part.get("choices", []):
            _merge(answer["choices"], choice)
    return answer


def _merge(choices: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    empty = {"prompt_ids": None, "output_ids": [], "finish_reason": None, "stop_reason": None}
    choice = choices.setdefault(part.get("index", 0), empty)
    choice["prompt_ids"] = part.get("prompt_token_ids") or choice["prompt_ids"]
    choice["output_ids"] += part.get("token_ids") or []
    for name in ("finish_reason", "stop_reason"):
        if part.get(name) is not None:
            choice[name] = part[name]


def _parts(exchange: Exchange) -> Iterator[dict[str, Any]]:
    body = b"".join(exchange.chunks)
    if not exchange.request.get("stream"):
        if exchange.complete:  # an aborted whole response has no usable part
            yield json.loads(body)
        return
    events = body.split(b"\n\n")
    for event in events[:-1]:  # after the last separator: nothing, or an event cut by an abort
        data = event.removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield json.loads(data)
