"""serving.replica when a change, a client or the disk fails in the middle."""

import asyncio

import pytest

from dflash.checkpoint import drafter_sha256
from serving import loaded, replica
from tests.helpers.replica_site import TARGET


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
        assert [one["bytes"] for one in found if isinstance(one, dict)] == [200_000] * 2
        assert (tmp_path / "x" / "config.json").read_bytes() == b"".join(parts)

    asyncio.run(run())
    assert [one.name for one in (tmp_path / "x").iterdir()] == ["config.json"]


def test_half_of_the_files_is_no_fault_of_the_drafter(site, drafters):
    """Two deliveries of one drafter may share its files."""
    second = drafter_sha256(drafters[1])

    async def run():
        for name in ("config.json", "model.safetensors"):
            data = (drafters[1] / name).read_bytes()
            await site.ask("PUT", f"/flywheel/drafters/{second}/{name}", data)
            asked = {"version": "2", "sha256": second, "target_id": TARGET}
            status, answer, _ = await site.ask("POST", "/flywheel/load", asked)
            assert (status, answer["restart"]) == (409, False)
            assert "send them again" in answer["error"]

    asyncio.run(run())
    assert not list(site.middleware.folder.iterdir())


def test_a_full_disk_is_no_fault_of_the_drafter(site, drafters, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("serving.exchange.load_drafter", full)

    async def run():
        status, answer, _ = await site.load(drafters[1])
        assert status == 503
        assert "No space left" in answer["error"]

    asyncio.run(run())
