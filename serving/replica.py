"""ASGI middleware that says what a vLLM server drafts with, and lets a roll-out change it.

    FLYWHEEL_TOKEN_FILE=token vllm serve MODEL --middleware serving.replica.Replica
        --worker-extension-cls serving.swap.DrafterSwap

Every response carries `x-flywheel-drafter: <version>/<first 12 of sha256>`, or `none`. What stands
below /flywheel/ needs `Authorization: Bearer <token>`, on every interface. vLLM's own development
endpoints stay off.

    GET  /flywheel/replica                   what runs, what is staged, the last fault
    GET  /flywheel/acceptance?after=N        acceptance of finished requests
    PUT  /flywheel/drafters/<sha256>/<file>  one file of a drafter folder
    POST /flywheel/load                      {version, sha256, target_id}: check it, load it beside
                                             the running one
    POST /flywheel/activate                  {sha256}: pause, exchange, compare, resume; with an
                                             empty sha256, draft nothing
    POST /flywheel/drop                      forget what is staged

Requests in flight wait while the engine is paused, and are computed anew for the new drafter
(vLLM's pause mode `keep`): none fails, and texts change at near ties only.

Environment: FLYWHEEL_TOKEN_FILE; FLYWHEEL_REPLICA, its name; FLYWHEEL_DRAFTER_VERSION, the version
that it starts with; FLYWHEEL_TARGET_ID, else it is computed; FLYWHEEL_REPLICA_DIR, a folder for
arriving files, else a temporary one.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import Counter, Gauge, Histogram

from dflash.identity import target_id
from serving import acceptance_feed, loaded
from serving.exchange import Drafters, Refused
from serving.start_checks import read_token
from serving.watch import App, Message, Receive, Scope, Send

ROOT = "/flywheel/"
FILE = re.compile(r"drafters/([0-9a-f]{64})/([A-Za-z0-9_][A-Za-z0-9_.-]*\.(?:json|safetensors))")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_JSON = 64 << 10
logger = logging.getLogger("vllm.flywheel.replica")

_swaps = Counter("flywheel_swaps", "Changes of the drafter, by what became of them", ["result"])
for _result in ("done", "undone", "refused"):
    _swaps.labels(_result)
_pauses = Histogram("flywheel_swap_pause_seconds", "How long a change paused the engine")
_info = Gauge("flywheel_drafter_info", "The drafter that is loaded", ["version", "sha256"])


class Replica:
    """The middleware; see the module. Raises ValueError at start-up without a usable token."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.token = read_token(os.environ.get("FLYWHEEL_TOKEN_FILE", ""))
        self.folder = Path(os.environ.get("FLYWHEEL_REPLICA_DIR") or tempfile.mkdtemp())
        self.drafters: Drafters | None = None
        self.beginning: asyncio.Task[None] | None = None
        self.working: set[asyncio.Task[dict[str, Any]]] = set()
        self.fault = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._begin_when_started(scope, send))
        elif scope["type"] == "http" and scope["path"].startswith(ROOT):
            status, answer = await self._answer(scope, receive)
            await _send_json(_with_header(send), status, answer)
        else:
            await self.app(scope, receive, _with_header(send))

    def _begin_when_started(self, scope: Scope, send: Send) -> Send:
        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self.beginning = asyncio.create_task(self._begin(scope["app"].state))
            await send(message)

        return told

    async def _begin(self, state: Any) -> None:
        try:
            config = state.vllm_config
            identity = os.environ.get("FLYWHEEL_TARGET_ID") or await asyncio.to_thread(
                target_id, config.model_config.model
            )
            drafters = Drafters(
                engine=state.engine_client,
                config=config,
                target_id=identity,
                folder=self.folder,
                count=lambda result: _swaps.labels(result).inc(),
            )
            await drafters.begin(os.environ.get("FLYWHEEL_DRAFTER_VERSION", ""))
            self.drafters = drafters
            _show()
        except Exception as error:
            self.fault = f"the server cannot tell what it drafts with: {error}"
            logger.exception("the replica cannot tell what it drafts with; /flywheel/ stays closed")

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        if not self._is_admitted(scope):
            return 401, {"error": "this needs the header `Authorization: Bearer <token>`"}
        if self.fault:
            return 500, {"error": self.fault}
        if self.drafters is None:
            return 503, {"error": "the server is starting: ask again"}
        try:
            return 200, await self._do(self.drafters, scope, receive)
        except Refused as error:
            logger.warning("refused: %s", error)
            return error.status, {"error": str(error), "restart": error.restart}
        except Exception as error:
            logger.exception("a change of the drafter failed")
            return 500, {"error": f"{type(error).__name__}: {error}", "restart": False}

    def _is_admitted(self, scope: Scope) -> bool:
        said = [value for name, value in scope["headers"] if name == b"authorization"]
        wanted = b"Bearer " + self.token
        return len(said) == 1 and hmac.compare_digest(said[0], wanted)

    async def _do(self, drafters: Drafters, scope: Scope, receive: Receive) -> dict[str, Any]:
        what = scope["method"], scope["path"].removeprefix(ROOT)
        if what == ("GET", "replica"):
            return drafters.status()
        if what == ("GET", "acceptance"):
            return acceptance_feed.read(_after(scope))
        if what[0] == "PUT" and (named := FILE.fullmatch(what[1])):
            return await _keep(self.folder / named[1], named[2], receive)
        if what[0] == "PUT" and what[1].endswith((".pt", ".bin")):
            raise Refused(422, f"{what[1].rpartition('/')[2]}: a drafter with pickles is not taken")
        if what[0] != "POST" or what[1] not in ("load", "activate", "drop"):
            raise Refused(404, f"there is no {what[0]} {scope['path']}")
        asked = await _read_json(receive)
        # Half a change is none: whoever asked may go away, and with it this task.
        work = asyncio.create_task(self._change(drafters, what[1], asked))
        self.working.add(work)
        work.add_done_callback(self.working.discard)
        return await asyncio.shield(work)

    async def _change(self, drafters: Drafters, what: str, asked: dict[str, Any]) -> dict[str, Any]:
        if what == "load":
            version, sha256 = _text(asked, "version"), _sha256(asked)
            known = await drafters.load(version, sha256, _text(asked, "target_id"))
            return {"staged": known.status()}
        if what == "activate":
            try:
                seconds = await drafters.activate(_sha256(asked, empty=True))
            finally:
                _show()
            _pauses.observe(seconds)
            return {"active": drafters.status()["active"], "pause_seconds": seconds}
        await drafters.drop()
        return {"staged": None}


def _show() -> None:
    """Name the loaded drafter in /metrics, and no former one."""
    now = loaded.now()
    _info.clear()
    _info.labels(now.version, now.sha256).set(1)


def _with_header(send: Send) -> Send:
    """`send`, with the drafter of this moment in the headers of the response."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            header = (b"x-flywheel-drafter", loaded.now().label.encode("latin-1", "replace"))
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return told


async def _send_json(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _keep(folder: Path, name: str, receive: Receive) -> dict[str, Any]:
    """Write the body of a request to a file, under a hidden name until it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    digest, size, more = hashlib.sha256(), 0, True
    # A name of its own: the same file may be sent again while a cut connection is not noticed yet.
    handle, partial = tempfile.mkstemp(".partial", f".{name}.", folder)
    try:
        with open(handle, "wb") as stream:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, f"the connection ended before all of {name} had arrived")
                part, more = message.get("body", b""), message.get("more_body", False)
                digest.update(part)
                size += len(part)
                await asyncio.to_thread(stream.write, part)
        os.replace(partial, folder / name)
    finally:
        Path(partial).unlink(missing_ok=True)
    return {"bytes": size, "sha256": digest.hexdigest()}


async def _read_json(receive: Receive) -> dict[str, Any]:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the connection ended before the request had arrived")
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MAX_JSON:
            raise Refused(413, f"a request has at most {MAX_JSON} bytes")
    try:
        asked = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise Refused(400, "the body must be a JSON object")
    return asked


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str) or not value or len(value) > 200 or not value.isprintable():
        raise Refused(400, f"{name} must be a text")
    return value


def _sha256(asked: dict[str, Any], empty: bool = False) -> str:
    value = asked.get("sha256")
    if not isinstance(value, str) or not (SHA256.fullmatch(value) or (empty and not value)):
        raise Refused(400, "sha256 must be 64 hex digits")
    return value


def _after(scope: Scope) -> int:
    said = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("after", ["0"])[-1]
    if not said.isdecimal() or len(said) > 18:
        raise Refused(400, "after must be a number")
    return int(said)
