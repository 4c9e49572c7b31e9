"""serving.replica around a small application, with an engine that only keeps what it is told."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash.checkpoint import drafter_sha256, engine_files
from serving.replica import Replica

TOKEN = "a-token-of-a-test-0123"
TARGET = "target-id"


class Engine:
    """What vLLM's engine client does, of one worker: the name of its drafter's folder is its look.

    faults: {number of an exchange: how it goes wrong}.
    """

    def __init__(self, folder: Path):
        self.live = self._look(folder)
        self.staged: dict[str, Any] | None = None
        self.silent = False
        self.calls: list[str] = []
        self.faults: dict[int, str] = {}
        self.exchanges = 0
        self.paused = False

    @staticmethod
    def _look(folder: Path) -> dict[str, Any]:
        return {"tensors": 3, "parameters_sha256": drafter_sha256(folder), "probe": [1, 2]}

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache, self.paused) == ("keep", True, False)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        found = getattr(self, method.removeprefix("flywheel_"))(*args)
        await asyncio.sleep(0)  # whether anybody waits for the answer or not
        return [found]

    def describe(self):
        return dict(self.live or {})

    def stage(self, folder: str):
        look = self._look(Path(folder))
        self.staged = look
        return dict(look)

    def exchange(self):
        assert self.paused, "the engine may compute meanwhile"
        self.exchanges += 1
        fault = self.faults.get(self.exchanges, "")
        if fault == "raises":
            raise RuntimeError("worker died")
        assert self.staged is not None
        self.live, self.staged = self.staged, self.live
        return self.live | ({"probe": [9]} if fault == "drafts" else {})

    def unstage(self):
        self.staged = None

    def silence(self, silent: bool):
        assert self.paused
        self.silent = silent
        return True


class Site:
    """The middleware in an application, and requests to it."""

    def __init__(self, folder: Path, drafter: Path):
        self.engine = Engine(drafter)
        spec = SimpleNamespace(
            draft_model_config=SimpleNamespace(model=str(drafter)),
            num_speculative_tokens=3,
            num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 3, 1]],
        )
        config = SimpleNamespace(speculative_config=spec)
        state = SimpleNamespace(vllm_config=config, engine_client=self.engine)
        self.app = SimpleNamespace(state=state)
        self.middleware = Replica(application)
        self.middleware.folder = folder

    async def start(self) -> None:
        sent = []

        async def send(message):
            sent.append(message)

        await self.middleware({"type": "lifespan", "app": self.app}, None, send)  # pyright: ignore[reportArgumentType]
        assert self.middleware.beginning is not None
        await self.middleware.beginning

    async def ask(self, method: str, path: str, body: Any = b"", token: str | None = TOKEN):
        """(status, answer, headers)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        parts = [data[:7], data[7:]]
        waiting = [
            {"type": "http.request", "body": part, "more_body": i == 0}
            for i, part in enumerate(parts)
        ]
        path, _, query = path.partition("?")
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        scope |= {"query_string": query.encode(), "app": self.app}
        sent: list[dict[str, Any]] = []

        async def receive():
            return waiting.pop(0)

        async def send(message):
            sent.append(message)

        await self.middleware(scope, receive, send)  # pyright: ignore[reportArgumentType]
        return sent[0]["status"], json.loads(sent[1]["body"]), dict(sent[0]["headers"])

    async def deliver(self, folder: Path, sha256: str) -> None:
        for file in engine_files(folder):
            path = f"/flywheel/drafters/{sha256}/{file.name}"
            status, answer, _ = await self.ask("PUT", path, file.read_bytes())
            assert status == 200, answer

    async def load(self, folder: Path, target_id: str = TARGET, version: str = "2", sha256=""):
        sha256 = sha256 or drafter_sha256(folder)
        await self.deliver(folder, sha256)
        asked = {"version": version, "sha256": sha256, "target_id": target_id}
        return await self.ask("POST", "/flywheel/load", asked)

    async def activate(self, sha256: str):
        return await self.ask("POST", "/flywheel/activate", {"sha256": sha256})

    async def status(self) -> dict[str, Any]:
        return (await self.ask("GET", "/flywheel/replica"))[1]


async def application(scope, receive, send):
    if scope["type"] == "lifespan":
        await send({"type": "lifespan.startup.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b"{}"})
