"""Throughput of a vLLM server with capture, feed and the endpoint of a roll-out over one without,
under streaming clients.

Part of `make bench-capture`. Needs a finished demo (make demo): its target, its newest drafter and
its held-out prompts. Both servers run side by side; passes of STREAMS streams go to one at a time.
"""

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from bench.harness import cpu_name, paired, report
from jobs.base.config import Config
from jobs.dataset.samples import load_requests
from jobs.evaluation.drafters import find_drafter
from jobs.servers.configured import server
from jobs.servers.server_pool import serving
from serving.client import counter
from serving.vllm_server import SERVED_NAME, Server

STREAMS, TOKENS, REPEATS = 32, 32, 6
MOST_PROMPT = 32  # tokens of a prompt: long ones would measure the prefill, which no token shows


def main(cfg: Config) -> None:
    """Compare and print the JSON line."""
    drafter = find_drafter(cfg, "")
    rows = [r["prompt_ids"][:MOST_PROMPT] for r in load_requests(cfg, "test")[0]]
    bodies = [_body(rows[i % len(rows)]) for i in range(STREAMS)]
    with tempfile.TemporaryDirectory() as folder:
        base = server(serving(cfg, drafter, [3]), "bench.log")
        base = replace(base, max_num_seqs=STREAMS, target_id="bench", drafter_version="1")
        token = Path(folder, "token")
        token.write_text("a-token-of-a-benchmark\n")
        ours = replace(base, log=Path(folder, "ours.log"), capture=Path(folder, "capture"))
        ours = replace(ours, token_file=token)
        theirs = replace(base, log=Path(folder, "theirs.log"), watch=False)
        with ours as with_all, theirs as without:
            last: dict[str, list[bytes]] = {}

            def one(of: Server) -> None:
                last[of.url] = asyncio.run(_pass(of.url, bodies))

            ratios = paired(lambda: one(with_all), lambda: one(without), REPEATS)
            texts = [[_text(stream) for stream in last[of.url]] for of in (with_all, without)]
            passes = REPEATS + 1
            detail = _account(with_all.url, Path(folder, "capture"), passes * STREAMS)
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= STREAMS * 0.9, f"only {same} of {STREAMS} texts are the same on both sides"
    settings = {"streams": STREAMS, "tokens": TOKENS, "cpu": cpu_name(), "target": cfg.target.path}
    report(
        "capture-load",
        ratios,
        "tok/s with capture, feed and endpoint / tok/s without",
        {"same_texts": same, "with": _middlewares(with_all), **settings, **detail},
    )


def _middlewares(one: Server) -> list[str]:
    args = one.vllm_args()
    return [args[i + 1] for i, arg in enumerate(args) if arg == "--middleware"]


def _body(prompt: list[int]) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _pass(url: str, bodies: list[dict[str, Any]]) -> list[bytes]:
    """The raw streams of all requests at once: nothing is parsed while the clock runs."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def one(body: dict[str, Any]) -> bytes:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert response.status_code == 200, response.status_code
                return b"".join([chunk async for chunk in response.aiter_raw()])

        return await asyncio.gather(*map(one, bodies))


def _text(stream: bytes) -> str:
    """The text of a stream; checks that it has all its tokens."""
    events = [e.removeprefix(b"data: ") for e in stream.split(b"\n\n") if e]
    parts = [json.loads(event) for event in events if event != b"[DONE]"]
    assert parts[-1]["usage"]["completion_tokens"] == TOKENS
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def _account(url: str, capture: Path, requests: int) -> dict[str, Any]:
    """Whether every request left its record, with rounds, and its count."""
    [log] = capture.glob("*.jsonl")
    records = [json.loads(line) for line in log.read_bytes().splitlines()]
    counted = sum(record["accepted"] is not None for record in records)
    assert counter(url, "flywheel_requests_total") == len(records) == counted == requests, counted
    return {"records": len(records), "record_bytes": log.stat().st_size // len(records)}
