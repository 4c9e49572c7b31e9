"""serving.replica: what it says, what it changes, what it refuses."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from dflash.checkpoint import drafter_sha256, save_drafter
from dflash.drafter_config import PUBLISHED_HEAD
from dflash.model import new_drafter
from serving import loaded, replica
from serving.replica import Replica
from tests.helpers.replica_site import TARGET, TOKEN, application
from tests.serving.conftest import tiny_config


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
            Replica(application)
    monkeypatch.delenv("FLYWHEEL_TOKEN_FILE")
    with pytest.raises(ValueError, match="FLYWHEEL_TOKEN_FILE is not set"):
        Replica(application)


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
    headed = replace(tiny_config(), **PUBLISHED_HEAD)  # all that a plain one has, and more
    save_drafter(new_drafter(headed, seed=0), tmp_path / "headed", torch.float32)
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
            (409, "selector_rank 256 != 0", True, {"folder": tmp_path / "headed"}),
        ):
            found, answer, _ = await site.load(**arguments)
            assert (found, answer["restart"]) == (status, restart)
            assert words in answer["error"]
        asked = {"version": "2", "sha256": second, "target_id": TARGET}
        assert (await site.ask("POST", "/flywheel/load", asked))[0] == 409, "no files"
        for body in (b"[]", b"{", {"sha256": second}, asked | {"sha256": "../x"}, b" " * 70_000):
            assert (await site.ask("POST", "/flywheel/load", body))[0] in (400, 413)
        names = {"../../x.json": 404, ".hidden.json": 404, "a/b.json": 404}
        for path, code in (names | {"mask_embedding.pt": 422, "x.bin": 422}).items():
            status, _, _ = await site.ask("PUT", f"/flywheel/drafters/{second}/{path}", b"1")
            assert status == code
        assert (await site.ask("GET", "/flywheel/acceptance?after=x"))[0] == 400
        now = await site.status()
        assert (now["active"], now["staged"], now["refused"]) == (before, None, 6)

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


def test_a_connection_that_ends_leaves_no_file(site, tmp_path):
    async def run():
        async def receive():
            return {"type": "http.disconnect"}

        with pytest.raises(replica.Refused, match="had arrived"):
            await replica._keep(tmp_path / "x", "config.json", receive)

    asyncio.run(run())
    assert not list((tmp_path / "x").iterdir())
