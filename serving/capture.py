"""ASGI middleware that records served traffic as token ids, beside any vLLM server.

    FLYWHEEL_CAPTURE_DIR=captured vllm serve MODEL --middleware serving.capture.Capture

Every choice of /v1/chat/completions and /v1/completions becomes one JSON line; no text is kept.
The request is changed in one way: `return_token_ids` is set, so clients see token ids that they may
not have asked for. With a tool or reasoning parser, a stream then also has a chunk for tokens that
show no text. Responses pass through as they are, streams unbuffered. What cannot be recorded is
served untouched and counted (OUTCOMES; `flywheel_capture_total` in /metrics).

A record also says which drafter was loaded, and how many drafts each round offered and accepted, of
streams and of n > 1 too (serving/watch.py, of which this is an extension). They are null where
vLLM's engine did not tell, and where the drafter changed during the request.

On the event loop a request costs one scan of its bytes (serving/capture_request.py). Answers are
parsed and written in a thread, behind a queue of bounded bytes. When it is full, records are
dropped and counted. Nothing that fails here reaches a request.

Environment: FLYWHEEL_CAPTURE_DIR; FLYWHEEL_CAPTURE_SAMPLE, the share of conversations kept
(default 1); FLYWHEEL_CAPTURE_TARGET_ID, copied into the records; what serving.loaded reads.
Headers: as in serving.watch. A request is not recorded if it says anything about consent that is
not a clear yes.
"""

import os
import socket
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from serving.capture_request import Asked
from serving.capture_writer import Exchange, Writer
from serving.loaded import replica_name
from serving.watch import (
    MAX_RESPONSE_BYTES,
    App,
    Receive,
    Recorder,
    Scope,
    Send,
    Served,
    Watch,
    counted,
    route_of,
)
from serving.watched_engine import state
from store.ids import says_nothing

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
    "swapped": "requests during which the drafter changed; they are recorded, without rounds",
    "dropped": "answers that found the queue full, or were larger than 64 MiB",
    "not_written": "records that the file system refused",
    "failed": "faults of the capture itself",
}
_outcomes = Counter(
    "flywheel_capture", "Traffic capture: requests and records by outcome", ["outcome"]
)
for _name in OUTCOMES:  # so that a count of zero is in /metrics, too
    _outcomes.labels(_name)


class Capture(Watch):
    """The middleware; see the module. Raises ValueError at start-up for a missing or unusable
    folder, or a FLYWHEEL_CAPTURE_SAMPLE outside 0..1.
    """

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self.sample = _share(os.environ.get("FLYWHEEL_CAPTURE_SAMPLE", "1"))
        self.writer = Writer(_new_file(os.environ.get("FLYWHEEL_CAPTURE_DIR", "")), _count)
        self.constants = {
            "target_id": os.environ.get("FLYWHEEL_CAPTURE_TARGET_ID") or None,
            "replica": replica_name(),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection. When the application shuts down, the writer is closed."""
        if scope["type"] == "lifespan":
            try:
                await self.app(scope, receive, send)
            finally:
                self.writer.close()
            return
        if route_of(scope) in NOT_CAPTURED:
            _count("not_captured")
        await super().__call__(scope, receive, send)

    def recorder(self, scope: Scope, asked: Asked | None, send: Send) -> Recorder:
        """One that keeps the response if the request is to be recorded; if not, it is counted."""
        if asked is not None and not asked.consents:
            _count("no_consent")
        elif asked is None or not asked.plain:
            _count("not_captured")
        elif not _is_sampled(asked.labels["conversation_id"], self.sample):
            _count("not_sampled")
        else:
            found = Recorder(send, keep=True)
            found.adapter = _adapter(scope, asked)
            return found
        return Recorder(send, keep=False)

    def record(self, scope: Scope, served: Served, recorder: Recorder) -> None:
        """Queue the answer for the writer, or count why not."""
        asked = served.asked
        assert asked is not None, "recorder() keeps nothing that could not be read"
        if recorder.status != 200:
            _count("not_ok")
        elif recorder.size > MAX_RESPONSE_BYTES:
            _count("dropped")
        else:
            if served.drafter is None:
                _count("swapped")
            facts = served.facts()
            record = {
                "v": 1,
                "captured_at": datetime.now(UTC).isoformat(),
                "endpoint": served.route,
                **asked.record(_sampling_defaults(scope)),
                **self.constants,
                "drafter": facts.pop("drafter_version"),
                **facts,
                "adapter": recorder.adapter or _adapter(scope, asked),
            }
            exchange = Exchange(
                record=record,
                chunks=recorder.chunks,
                complete=recorder.complete,
                rounds={} if served.drafter is None else counted(served),
            )
            self.writer.put(exchange, recorder.size)

    def fault(self) -> None:
        """Count it."""
        _count("failed")


def _adapter(scope: Scope, asked: Asked) -> str | None:
    """The requested model name if vLLM now serves a LoRA adapter under it, else None."""
    name = asked.fields.get("model")
    adapters = getattr(state(scope, "openai_serving_models"), "lora_requests", {})
    return name if isinstance(name, str) and name in adapters else None


def _sampling_defaults(scope: Scope) -> dict[str, Any]:
    """The sampling parameters that vLLM uses where a request sets none, and what it does to every
    choice.

    They come from the model's generation_config.json, --override-generation-config,
    --logits-processors and --tool-strict-level; store.shaped_answers reads them.
    """
    chat = state(scope, "openai_serving_chat")
    completion = state(scope, "openai_serving_completion")
    defaults = dict(getattr(chat or completion, "default_sampling_params", {}))
    model = getattr(state(scope, "vllm_config"), "model_config", None)
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
