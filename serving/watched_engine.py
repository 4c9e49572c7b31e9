"""What vLLM's engine says about each choice of an answer, heard where its API server hears it.

A response tells a client about its rounds only without streaming, or in a stream that asks for
usage, and never for n > 1. The engine's own outputs carry them for every choice. So `generate` of
the engine client is wrapped: it gives the same outputs, and notes them for the request at work.

All that depends on vLLM (0.32) is here: the state of its application, the arguments of `generate`,
and the fields of RequestOutput. Nothing that fails here reaches a request: what is not as expected
gives no counts.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from serving.capture_writer import OncePerMinute

WRAPPED = "flywheel_watched"
CLIENT_FAULTS = {"VLLMClientError", "GracefulHTTPError"}
"""Exceptions of the engine that a client causes, by name: importing vLLM takes seconds."""

UNREADABLE = "vLLM's outputs could not be read %d times"
_faulty = OncePerMinute()
logger = logging.getLogger("vllm.flywheel.watch")


@dataclass(slots=True)
class Choice:
    """One sequence of tokens. `accepted` and `drafted` are vLLM's counts of the steps that verified
    drafts, not cut at the end of text; None if they never left the engine: it did not draft, the
    client went away first, or a stop string ended the text.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None  # None: it has not ended
    accepted: list[int] | None = None
    drafted: list[int] | None = None


@dataclass(slots=True)
class Answer:
    """What the engine has sent for one HTTP request. Choices are numbered as in the response."""

    choices: dict[int, Choice] = field(default_factory=dict)
    request_id: str = ""
    temperature: float | None = None
    first_token_seconds: float | None = None  # since the request came; None: not known
    failed: bool = False  # the engine failed, or refused for a reason that is not the client's
    broken: bool = False  # an output was not as expected: the counts are not to be used
    started: float = field(default_factory=time.monotonic)
    _prompts: int = 0

    def expects(self, params: Any, request_id: str) -> int:
        """Note a call of `generate` for one more prompt; returns the number of its first choice."""
        first = self._prompts * (getattr(params, "n", None) or 1)
        self._prompts += 1
        self.temperature = getattr(params, "temperature", None)
        # Of a completion, vLLM adds the number of the prompt.
        is_part = request_id.startswith("cmpl-")
        self.request_id = request_id.rpartition("-")[0] if is_part else request_id
        return first

    def add(self, output: Any, first: int, is_delta: bool) -> None:
        """Note one output of the engine; it may hold parts of several choices."""
        for part in output.outputs:
            choice = self.choices.get(first + part.index)
            if choice is None:
                choice = self.choices[first + part.index] = Choice(len(output.prompt_token_ids))
            tokens = len(part.token_ids)
            choice.output_tokens = tokens + (choice.output_tokens if is_delta else 0)
            if self.first_token_seconds is None and tokens:
                self.first_token_seconds = self._first_token(output, is_delta)
            if part.finish_reason is not None:
                choice.finish_reason = part.finish_reason
                self.failed |= part.finish_reason == "error"
                choice.accepted, choice.drafted = _steps(part.spec_decode_metrics)

    def _first_token(self, output: Any, is_delta: bool) -> float | None:
        if is_delta:
            return time.monotonic() - self.started
        return getattr(output.metrics, "first_token_latency", None) or None


def _steps(metrics: Any) -> tuple[list[int], list[int]] | tuple[None, None]:
    """(accepted, drafted) of each step with drafts; (None, None) if vLLM only counted them."""
    if metrics is None or sum(metrics.histogram) != len(metrics.per_step_accepted):
        return None, None
    return metrics.per_step_accepted, metrics.per_step_drafted


_at_work: ContextVar[Answer | None] = ContextVar("flywheel_answer", default=None)


@contextlib.contextmanager
def watching(scope: MutableMapping[str, Any]) -> Iterator[Answer]:
    """An Answer that fills itself while the application serves this request within the block. It
    stays empty for another application than vLLM's.
    """
    client = state(scope, "engine_client")
    if client is not None and not hasattr(client, WRAPPED):
        with contextlib.suppress(AttributeError):  # a client that takes no attributes: not watched
            setattr(client, WRAPPED, client.generate)
            client.generate = _noting(client.generate)
    answer = Answer()
    token = _at_work.set(answer)
    try:
        yield answer
    finally:
        _at_work.reset(token)


def state(scope: MutableMapping[str, Any], name: str) -> Any:
    """What vLLM's server keeps under that name in its state; None for another application."""
    return getattr(getattr(scope.get("app"), "state", None), name, None)


def most_drafts(scope: MutableMapping[str, Any]) -> int:
    """The largest K that this server drafts with; 0 without a drafter."""
    config = getattr(state(scope, "vllm_config"), "speculative_config", None)
    return getattr(config, "num_speculative_tokens", None) or 0


def _noting(generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Any]:
    """`generate`, noting its outputs for the request that calls it."""

    def noting(*args: Any, **named: Any) -> AsyncGenerator[Any, None]:
        outputs, answer = generate(*args, **named), _at_work.get()
        if answer is None:
            return outputs
        try:
            params = named["sampling_params"] if "sampling_params" in named else args[1]
            request_id = named["request_id"] if "request_id" in named else args[2]
            first = answer.expects(params, request_id)
            is_delta = params.output_kind.name == "DELTA"
        except Exception:  # as below
            answer.broken = True
            if times := _faulty.due():
                logger.exception(UNREADABLE, times)
            return outputs
        return _noted(outputs, answer, first, is_delta)

    return noting


async def _noted(
    outputs: AsyncGenerator[Any, None], answer: Answer, first: int, is_delta: bool
) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):  # the engine aborts a request when this is closed
        try:
            async for output in outputs:
                try:
                    answer.add(output, first, is_delta)
                except Exception:  # whatever it is, the served request comes first
                    answer.broken = True
                    if times := _faulty.due():
                        logger.exception(UNREADABLE, times)
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            names = {kind.__name__ for kind in type(error).__mro__}
            answer.failed |= not names & CLIENT_FAULTS
            raise
