"""make bench-capture [ARGS="work=runs/mine"]: what the capture costs a server.

First its event loop, by the size of the request; then, in a second JSON line, the throughput of a
server with 32 streams (bench/capture_load.py), for which a finished demo is needed.

The capture reads a request before it is served, and meanwhile the loop serves no other request.
Compared are one scan of its bytes (ours), and parsing it and writing it again with
`return_token_ids` (as the capture did at first). `detail` has the milliseconds of both, of
json.loads of the same body, which vLLM itself does on the same loop, and of whole exchanges through
the middleware.
"""

import asyncio
import json
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from bench import capture_load
from bench.harness import cpu_name, paired, report, seconds
from jobs.base.config import load
from serving.capture import Capture
from serving.capture_request import read, with_token_ids

SIZES = {"12 kB": 2_000, "1 MB": 170_000, "10 MB": 1_700_000}
ANSWER = {
    "id": "r",
    "prompt_token_ids": list(range(1000)),
    "choices": [{"index": 0, "finish_reason": "stop", "token_ids": list(range(500))}],
}


def bodies(words: int) -> dict[str, bytes]:
    """Requests with the same amount of prompt: as one text, as many messages, and as token ids."""
    text = [{"role": "user", "content": 'word "w"\n' * (words * 6 // 9)}]
    chat = [{"role": "user", "content": "some words here"}] * (words // 8)
    requests: list[dict[str, Any]] = [
        {"messages": text},
        {"messages": chat},
        {"prompt": list(range(1000, 1000 + words))},
    ]
    both = {"model": "m", "temperature": 0, "metadata": {"domain": "d", "consent": True}}
    names = ("text", "messages", "ids")
    return {n: json.dumps(both | r).encode() for n, r in zip(names, requests, strict=True)}


def parse_and_dump(body: bytes) -> bytes:
    """What the capture did at first."""
    return json.dumps(json.loads(body) | {"return_token_ids": True}).encode()


def scan(body: bytes) -> bytes:
    """What the capture does now, for a text-only server."""
    asked = read([], body, text_only=True)
    assert asked is not None
    assert asked.consents
    return with_token_ids(body)


def exchange(middleware: Capture, body: bytes) -> None:
    """One request through the middleware to an application that answers at once."""
    config = SimpleNamespace(is_multimodal_model=False, enable_prompt_embeds=False)
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=SimpleNamespace(model_config=config)))
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
    }
    scope["app"] = app

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(_: Any) -> None:
        return

    asyncio.run(middleware(scope, receive, send))


async def _application(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(ANSWER).encode()})


def main() -> None:
    """Compare both parts and print their JSON lines."""
    cfg = load(None, sys.argv[1:])
    event_loop()
    capture_load.main(cfg)


def event_loop() -> None:
    """Compare and print the JSON line."""
    detail: dict[str, Any] = {"cpu": cpu_name()}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLYWHEEL_CAPTURE_DIR"] = folder
        middleware = Capture(_application)
        for size, words in SIZES.items():
            for kind, body in bodies(words).items():
                assert json.loads(scan(body)) == json.loads(parse_and_dump(body))
                again = 200 if len(body) < 100_000 else 1
                sides = [
                    lambda f=f, b=body, n=again: [f(b) for _ in range(n)]
                    for f in (scan, parse_and_dump, json.loads)
                ]
                ratios += paired(sides[0], sides[1], repeats=5)
                once = [min(seconds(side) for _ in range(5)) * 1e3 / again for side in sides]
                names = ("scan_ms", "parse_and_dump_ms", "server_loads_ms")
                whole = min(seconds(lambda b=body: exchange(middleware, b)) for _ in range(5)) * 1e3
                detail[f"{size} {kind}"] = {
                    n: round(ms, 3) for n, ms in zip(names, once, strict=True)
                } | {"bytes": len(body), "exchange_ms": round(whole, 3)}
        middleware.writer.close()
    report("capture", ratios, "s parse and dump / s scan, on the event loop", detail)


if __name__ == "__main__":
    main()
