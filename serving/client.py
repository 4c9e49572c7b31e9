"""Requests to a served model, many at a time: answers with their token ids, and speed."""

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from tqdm import tqdm

from serving.vllm_server import SERVED_NAME

Messages = list[dict[str, str]]
Answered = TypeVar("Answered")


class Refused(ValueError):
    """The server understood a request and will not answer it (HTTP 4xx); its own words say why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt: chat messages, or token ids as they are. The labels are sent for the capture."""

    prompt: Messages | list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    conversation: str | None = None
    domain: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of the body

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is messages."""
        return bool(self.prompt) and isinstance(self.prompt[0], dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One answer. `spec` is vLLM's per-request metrics of speculative decoding, if it drafts."""

    request_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    spec: dict[str, Any] | None
    top_logprobs: list[dict[int, float]]  # per output token, where `extra` asked for them
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)  # per prompt token
    started: float  # seconds since the epoch
    seconds: float
    decode_seconds: float | None  # from the first output token to the last, by vLLM's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Served tokens per second without and with a drafter, pass by pass, and their ratio."""

    concurrency: int
    plain: list[float]
    drafted: list[float]
    ratios: list[float]  # drafted / plain, pass by pass
    ratio: float  # their median
    plain_seconds: list[float]  # from request to answer, of all passes
    drafted_seconds: list[float]


def complete(
    url: str, requests: Sequence[Request], concurrency: int, label: str = ""
) -> list[Completion]:
    """Answers in the order of the requests, `concurrency` of them in flight at a time. With a
    `label`, progress is shown.

    Raises ValueError if the server refuses a request (with its own words) or cannot be reached.
    """
    found = asyncio.run(_complete(url, requests, concurrency, label))
    return [answer for answer in found if isinstance(answer, Completion)]


def complete_each(
    url: str, requests: Sequence[Request], concurrency: int, label: str = ""
) -> list[Completion | Refused]:
    """As `complete`, but a request that the server refuses has that refusal as its answer, and the
    others go on.
    """
    return asyncio.run(_complete(url, requests, concurrency, label, each=True))


async def _complete(
    url: str, requests: Sequence[Request], concurrency: int, label: str, each: bool = False
) -> list[Completion | Refused]:
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    bar = tqdm(total=len(requests), desc=label, unit="request", disable=None if label else True)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def one(request: Request) -> Completion | Refused:
            async with slots:
                try:
                    answer = await _ask(client, request)
                except Refused as refused:
                    if not each:
                        raise
                    answer = refused
            bar.update()
            return answer

        with bar:
            return await _all(one(request) for request in requests)


async def _all(tasks: Iterable[Coroutine[Any, Any, Answered]]) -> list[Answered]:
    """Results in order; the first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(task) for task in tasks]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


async def _ask(client: httpx.AsyncClient, request: Request) -> Completion:
    started, clock = time.time(), time.perf_counter()
    body = await _post(client, *_as_http(request))
    choice, metrics = body["choices"][0], body.get("metrics") or {}
    decode_ms = metrics.get("generation_time_ms")
    return Completion(
        request_id=body["id"],
        prompt_ids=body.get("prompt_token_ids") or choice["prompt_token_ids"],
        output_ids=choice["token_ids"],
        text=choice["message"]["content"] if request.is_chat else choice["text"],
        finish_reason=choice["finish_reason"],
        spec=metrics.get("speculative_decoding"),
        top_logprobs=_top_logprobs(choice),
        prompt_logprobs=[
            {int(token): told["logprob"] for token, told in (top or {}).items()}
            for top in choice.get("prompt_logprobs") or []
        ],
        started=started,
        seconds=time.perf_counter() - clock,
        decode_seconds=None if decode_ms is None else decode_ms / 1000,
    )


def _top_logprobs(choice: dict[str, Any]) -> list[dict[int, float]]:
    """Top log-probabilities of a /v1/completions choice that was asked for with
    `return_tokens_as_token_ids`: its keys read "token_id:123".
    """
    positions = (choice.get("logprobs") or {}).get("top_logprobs") or []
    return [{int(key.partition(":")[2]): p for key, p in top.items()} for top in positions]


def _as_http(request: Request) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Endpoint, body and headers."""
    body = {
        "model": SERVED_NAME,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "return_token_ids": True,
        "messages" if request.is_chat else "prompt": request.prompt,
        **({} if request.seed is None else {"seed": request.seed}),
        **request.extra,
    }
    labels = {"Conversation": request.conversation, "Domain": request.domain}
    headers = {f"X-Flywheel-{name}": value for name, value in labels.items() if value is not None}
    return "/v1/chat/completions" if request.is_chat else "/v1/completions", body, headers


async def _post(
    client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], headers: dict[str, str]
) -> dict[str, Any]:
    try:
        response = await client.post(endpoint, json=body, headers=headers)
    except httpx.TransportError as error:
        raise ValueError(f"no answer from {client.base_url.join(endpoint)}: {error!r}") from error
    if response.status_code != 200:
        told = f"{response.url} answered {response.status_code}: {response.text[:500]}"
        raise Refused(told) if 400 <= response.status_code < 500 else ValueError(told)
    return response.json()


def counter(url: str, name: str) -> float:
    """A counter of /metrics, summed over its labels; 0 if the server does not have it.

    Raises ValueError if the server cannot be reached.
    """
    try:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    except httpx.TransportError as error:
        raise ValueError(f"no answer from {url}/metrics: {error!r}") from error
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith((name + "{", name + " "))
    )


def compare_speeds(
    sides: tuple[Callable[[], str], Callable[[], str]],
    loads: Mapping[int, Sequence[Request]],
    repeats: int = 3,
    interleaved: bool = True,
) -> list[Speed]:
    """Output tokens per second of a plain and a drafting server, for each concurrency in `loads`.

    Each pass sends all requests to one server and waits for the answers. The order within a pair of
    passes alternates, so drift of the machine hits both servers. One unmeasured request per server
    and load comes first. Both servers may run: an idle one costs nothing measurable.

    sides: functions that return the URL of the plain and of the drafting server, called before each
    pass. Where only one server can run at a time, they start it. Then `interleaved` must be False:
    all passes of one side run in a row, and drift of the machine counts as speed.
    """
    passes = (
        [
            (side, at)
            for at in loads
            for repeat in range(repeats)
            for side in ((0, 1) if repeat % 2 == 0 else (1, 0))
        ]
        if interleaved
        else [(side, at) for side in (1, 0) for at in loads for _ in range(repeats)]
    )
    rates: dict[tuple[int, int], list[float]] = {}
    seconds: dict[tuple[int, int], list[float]] = {}
    for key in passes:
        side, at = key
        url = sides[side]()
        if key not in rates:
            complete(url, loads[at][:1], 1)
        rate, latencies = _pass(url, loads[at], at)
        rates.setdefault(key, []).append(rate)
        seconds.setdefault(key, []).extend(latencies)
    found = []
    for at in loads:
        plain, drafted = rates[0, at], rates[1, at]
        ratios = [b / a for a, b in zip(plain, drafted, strict=True)]
        found.append(
            Speed(
                concurrency=at,
                plain=plain,
                drafted=drafted,
                ratios=ratios,
                ratio=statistics.median(ratios),
                plain_seconds=seconds[0, at],
                drafted_seconds=seconds[1, at],
            )
        )
    return found


def _pass(url: str, requests: Sequence[Request], concurrency: int) -> tuple[float, list[float]]:
    """Output tokens per second, and the seconds each request waited for its answer."""
    clock = time.perf_counter()
    answers = complete(url, requests, concurrency)
    tokens = sum(len(answer.output_ids) for answer in answers)
    return tokens / (time.perf_counter() - clock), [answer.seconds for answer in answers]
