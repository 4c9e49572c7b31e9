"""serving.replica around a small application, with an engine that only keeps what it is told."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash.checkpoint import drafter_sha256, engine_files, save_drafter
from dflash.model import new_drafter
from serving import loaded, replica
from serving.replica import Replica
from tests.serving.conftest import tiny_config

TOKEN = "a-token-of-a-test-0123"
TARGET = "target-id"


class Engine:
    """What vLLM's engine client does, of one worker: the name of its drafter's folder is its look.

    faults: {number of an exchange: how it goes wrong}.
    """

    def __init__(self, folder: Path):
        self.live, self.staged, self.silent = self._look(folder), None, False
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
        return dict(self.live)

    def stage(self, folder: str):
        self.staged = self._look(Path(folder))
        return dict(self.staged)

    def exchange(self):
        assert self.paused, "the engine may compute meanwhile"
        self.exchanges += 1
        fault = self.faults.get(self.exchanges, "")
        if fault == "raises":
            raise RuntimeError("worker died")
        self.live, self.staged = self.staged, self.live
        assert self.live is not None
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
        self.middleware = Replica(_application)
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


async def _application(scope, receive, send):
    if scope["type"] == "lifespan":
        await send({"type": "lifespan.startup.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def drafters(tmp_path):
    """Folders of two drafters of one shape."""
    folders = [tmp_path / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        save_drafter(new_drafter(tiny_config(), seed=seed), folder, torch.float32)
    return folders


@pytest.fixture
def site(tmp_path, drafters, monkeypatch):
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("FLYWHEEL_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("FLYWHEEL_TARGET_ID", TARGET)
    monkeypatch.setenv("FLYWHEEL_DRAFTER_VERSION", "1")
    monkeypatch.setattr(loaded, "_current", loaded.Loaded("", ""))
    made = Site(tmp_path / "arriving", drafters[0])
    asyncio.run(made.start())
    return made


def test_a_token_is_needed(site, tmp_path, monkeypatch):
    async def run():
        for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x", "ä" * 20):
            for method, path in (
                ("GET", "/flywheel/replica"),
                ("GET", "/flywheel/acceptance"),
                ("PUT", f"/flywheel/drafters/{'0' * 64}/config.json"),
                ("POST", "/flywheel/drop"),
            ):
                status, answer, _ = await site.ask(method, path, token=token)
                assert status == 401
                assert TOKEN not in json.dumps(answer)
        assert (await site.ask("GET", "/v1/models", token=None))[0] == 200

    asyncio.run(run())
    assert not (tmp_path / "arriving").exists()
    for content, message in (("short", "fewer than 16"), (None, "No such file")):
        (tmp_path / "token").write_text(content) if content else (tmp_path / "token").unlink()
        with pytest.raises(ValueError, match=message):
            Replica(_application)
    monkeypatch.delenv("FLYWHEEL_TOKEN_FILE")
    with pytest.raises(ValueError, match="FLYWHEEL_TOKEN_FILE is not set"):
        Replica(_application)


def test_status_and_header_say_what_runs(site, drafters):
    async def run():
        first = drafter_sha256(drafters[0])
        status = await site.status()
        assert status["active"]["version"] == "1"
        assert status["active"]["sha256"] == first
        assert status["active"]["compat"]["target_id"] == TARGET
        assert (status["k"], status["state"], status["staged"]) == ([3, 3, 1], "ready", None)
        headers = (await site.ask("GET", "/v1/models"))[2]
        assert headers[b"x-flywheel-drafter"] == f"1/{first[:12]}".encode()
        assert headers[b"a"] == b"b"

    asyncio.run(run())


def test_a_swap_and_back(site, drafters):
    async def run():
        first, second = map(drafter_sha256, drafters)
        status, answer, _ = await site.load(drafters[1])
        assert (status, answer["staged"]["sha256"]) == (200, second)
        assert (await site.status())["active"]["sha256"] == first
        status, answer, headers = await site.activate(second)
        assert status == 200
        assert answer["active"]["version"] == "2"
        assert headers[b"x-flywheel-drafter"] == f"2/{second[:12]}".encode()
        assert (await site.activate(second))[1]["pause_seconds"] == 0
        assert (await site.activate(first))[0] == 409, "it was forgotten"
        await site.load(drafters[0], version="1")
        assert (await site.activate(first))[0] == 200
        status = await site.status()
        assert (status["swaps"], status["refused"], status["fault"]) == (2, 0, "")

    asyncio.run(run())
    assert site.engine.staged is None
    assert not site.engine.paused
    assert not list(site.middleware.folder.iterdir()), "files are removed once they are loaded"


def test_silence_and_speak_again(site, drafters):
    async def run():
        first, second = map(drafter_sha256, drafters)
        assert (await site.activate(""))[1]["active"] is None
        assert (site.engine.silent, (await site.status())["active"]) == (True, None)
        assert (await site.ask("GET", "/v1/models"))[2][b"x-flywheel-drafter"] == b"none"
        assert (await site.activate(first))[1]["active"]["sha256"] == first
        assert not site.engine.silent
        await site.activate("")
        await site.load(drafters[1])
        assert (await site.activate(second))[0] == 200
        assert not site.engine.silent

    asyncio.run(run())


def test_what_is_refused_changes_nothing(site, drafters, tmp_path):
    wide = tmp_path / "wide"
    shape = tiny_config()
    object.__setattr__(shape, "block_size", 8)
    save_drafter(new_drafter(shape, seed=0), wide, torch.float32)
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "config.json").write_bytes((drafters[1] / "config.json").read_bytes())
    (torn / "model.safetensors").write_bytes(b"torn")
    second = drafter_sha256(drafters[1])

    async def run():
        before = (await site.status())["active"]
        for status, words, restart, arguments in (
            (422, "for target other", False, {"folder": drafters[1], "target_id": "other"}),
            (409, "the files that arrived are drafter", False, {"folder": torn, "sha256": second}),
            (422, "safetensors", False, {"folder": torn}),
            (409, "block_size 8 != 4", True, {"folder": wide}),
        ):
            found, answer, _ = await site.load(**arguments)
            assert (found, answer["restart"]) == (status, restart)
            assert words in answer["error"]
        asked = {"version": "2", "sha256": second, "target_id": TARGET}
        assert (await site.ask("POST", "/flywheel/load", asked))[0] == 409, "no files"
        for body in (b"[]", b"{", {"sha256": second}, asked | {"sha256": "../x"}, b" " * 70_000):
            assert (await site.ask("POST", "/flywheel/load", body))[0] in (400, 413)
        for path in ("../../x.json", "mask_embedding.pt", ".hidden.json", "a/b.json", "x.bin"):
            status, _, _ = await site.ask("PUT", f"/flywheel/drafters/{second}/{path}", b"1")
            assert status == 404
        assert (await site.ask("GET", "/flywheel/acceptance?after=x"))[0] == 400
        now = await site.status()
        assert (now["active"], now["staged"], now["refused"]) == (before, None, 5)

    asyncio.run(run())
    assert "flywheel_exchange" not in site.engine.calls


@pytest.mark.parametrize("fault", ["drafts", "raises"])
def test_what_did_not_load_right_is_undone(site, drafters, fault):
    async def run():
        first, second = map(drafter_sha256, drafters)
        site.engine.faults = {1: fault}
        await site.load(drafters[1])
        status, answer, _ = await site.activate(second)
        assert status == 500
        assert "the former one serves again" in answer["error"]
        found = await site.status()
        assert (found["state"], found["active"]["sha256"]) == ("ready", first)
        assert (found["swaps"], found["refused"]) == (0, 1)
        assert second[:12] in found["fault"]
        assert loaded.now().sha256 == first

    asyncio.run(run())
    assert not site.engine.paused
    assert site.engine.live["parameters_sha256"] == drafter_sha256(drafters[0])


def test_what_cannot_be_undone_is_broken(site, drafters):
    async def run():
        site.engine.faults = {1: "drafts", 2: "raises"}
        await site.load(drafters[1])
        status, answer, _ = await site.activate(drafter_sha256(drafters[1]))
        assert status == 500
        assert "restart it" in answer["error"]
        assert (await site.status())["state"] == "broken"

    asyncio.run(run())
    assert not site.engine.paused, "requests go on: texts are the target's with any drafter"


def test_a_broken_replica_names_no_drafter_until_an_exchange_succeeds(site, drafters):
    async def run():
        first, second = map(drafter_sha256, drafters)
        site.engine.faults = {1: "drafts", 2: "raises"}
        await site.load(drafters[1])
        await site.activate(second)
        assert (await site.status())["active"] is None
        assert loaded.now().label == "none"
        assert site.engine.silent
        assert (await site.activate(first))[0] == 409, "it has to be loaded again"
        assert (await site.status())["state"] == "broken"
        await site.load(drafters[0], version="1")
        assert (await site.activate(first))[0] == 200
        found = await site.status()
        assert (found["state"], found["active"]["sha256"]) == ("ready", first)
        assert site.engine.live["parameters_sha256"] == first
        assert not site.engine.silent

    asyncio.run(run())


@pytest.mark.parametrize("moment", range(12))
def test_a_request_that_is_cancelled_does_not_leave_half_a_change(site, drafters, moment):
    async def run():
        second = drafter_sha256(drafters[1])
        await site.load(drafters[1])
        asking = asyncio.create_task(site.activate(second))
        for _ in range(moment):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        found = await site.ask("POST", "/flywheel/drop", {})  # waits for what runs
        assert found[0] == 200
        status = await site.status()
        assert status["state"] == "ready"
        assert not site.engine.paused
        assert status["active"]["sha256"] == site.engine.live["parameters_sha256"]
        assert loaded.now().sha256 == status["active"]["sha256"]

    asyncio.run(run())


@pytest.mark.parametrize("method", ["pause_generation", "resume_generation"])
def test_a_pause_that_fails_leaves_no_paused_engine_and_is_told(site, drafters, method):
    whole = getattr(site.engine, method)

    async def failing(**how):
        setattr(site.engine, method, whole)
        await whole(**how)
        raise RuntimeError("no answer in time")

    async def run():
        second = drafter_sha256(drafters[1])
        await site.load(drafters[1])
        setattr(site.engine, method, failing)
        assert (await site.activate(second))[0] == 500
        assert not site.engine.paused
        status = await site.status()
        assert (status["state"], status["active"]) == ("broken", None)
        assert "no answer in time" in status["fault"]
        await site.load(drafters[1])
        assert (await site.activate(second))[0] == 200
        assert (await site.status())["state"] == "ready"

    asyncio.run(run())


def test_files_sent_again_while_they_are_loaded_are_not_lost(site, drafters, monkeypatch):
    """A client that waited too long for the load sends everything again."""
    second = drafter_sha256(drafters[1])
    whole, waits = site.engine.collective_rpc, asyncio.Event()

    async def slow(method, args=()):
        if method == "flywheel_stage":
            await waits.wait()
        return await whole(method, args)

    monkeypatch.setattr(site.engine, "collective_rpc", slow)

    async def run():
        first = asyncio.create_task(site.load(drafters[1]))
        while not site.middleware.drafters.lock.locked():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        again = asyncio.create_task(site.load(drafters[1]))
        await asyncio.sleep(0.05)
        waits.set()
        assert [(await one)[0] for one in (first, again)] == [200, 200]
        assert (await site.activate(second))[0] == 200

    asyncio.run(run())
    assert not list(site.middleware.folder.iterdir())


def test_the_same_file_sent_twice_at_once_is_whole(tmp_path):
    async def run():
        parts = [b"a" * 100_000, b"b" * 100_000]
        go = asyncio.Event()

        def sender(cut: bool):
            waiting = list(parts)

            async def receive():
                if len(waiting) == 1:
                    await go.wait()
                    if cut:
                        return {"type": "http.disconnect"}
                part = waiting.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(waiting)}

            return receive

        keeping = [
            asyncio.create_task(replica._keep(tmp_path / "x", "config.json", sender(cut)))
            for cut in (True, False, False)
        ]
        await asyncio.sleep(0.05)
        go.set()
        found = await asyncio.gather(*keeping, return_exceptions=True)
        assert isinstance(found[0], replica.Refused)
        assert [one["bytes"] for one in found[1:]] == [200_000] * 2
        assert (tmp_path / "x" / "config.json").read_bytes() == b"".join(parts)

    asyncio.run(run())
    assert [one.name for one in (tmp_path / "x").iterdir()] == ["config.json"]


def test_a_full_disk_is_no_fault_of_the_drafter(site, drafters, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("serving.exchange.load_drafter", full)

    async def run():
        status, answer, _ = await site.load(drafters[1])
        assert status == 503
        assert "No space left" in answer["error"]

    asyncio.run(run())


def test_a_connection_that_ends_leaves_no_file(site, tmp_path):
    async def run():
        async def receive():
            return {"type": "http.disconnect"}

        with pytest.raises(replica.Refused, match="had arrived"):
            await replica._keep(tmp_path / "x", "config.json", receive)

    asyncio.run(run())
    assert not list((tmp_path / "x").iterdir())
