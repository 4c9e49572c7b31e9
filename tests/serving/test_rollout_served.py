"""`flywheel rollout` over real vLLM servers: a good drafter advances, though a replica is killed in
the middle of its swap, and a bad one goes back.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dflash.checkpoint import drafter_sha256, save_drafter
from dflash.identity import target_id
from dflash.model import new_drafter
from jobs import rollout
from jobs.base.config import load
from jobs.registry.versions import CHAMPION, resolve
from pipelines.demo_fleet import force
from serving.client import complete
from serving.replica_client import ReplicaClient, Unreachable
from serving.vllm_server import Server
from store import promotions
from tests.serving.conftest import LEARNED, tiny_config
from tests.serving.test_swap_served import REQUESTS, SMALL, TOKEN, Admin, Streams

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class KillOnce:
    """Kills a replica while its first swap is under way; `killed` has it then."""

    def __init__(self, servers: list[Server], patch: pytest.MonkeyPatch):
        self.servers = {server.url: server for server in servers}
        self.killed: list[Server] = []
        self.done = threading.Event()
        self.real = ReplicaClient.activate
        patch.setattr(ReplicaClient, "activate", lambda client, sha: self._activate(client, sha))

    def _activate(self, client: ReplicaClient, sha256: str):
        if self.killed:
            return self.real(client, sha256)
        server = self.servers[client.url]
        self.killed.append(server)
        assert server._process is not None
        threading.Timer(0.03, os.killpg, (server._process.pid, signal.SIGKILL)).start()
        with pytest.raises(Unreachable) as cut:
            self.real(client, sha256)
        self.done.set()
        raise cut.value


def restart(server: Server) -> None:
    """As a supervisor does, with the drafter that it began with, once its port is free."""
    until = time.monotonic() + 60
    while True:
        try:
            server.start()
            break
        except ValueError:
            assert time.monotonic() < until, "the killed server keeps its port"
            time.sleep(0.5)
    server.wait_until_ready()


def test_good_advances_and_bad_goes_back(
    tiny_target, tiny_drafter, learned_drafter, tmp_path, monkeypatch
):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    bad = tmp_path / "bad"
    save_drafter(new_drafter(tiny_config(), seed=7), bad, torch.float32)
    identity = target_id(tiny_target)
    settings = {"token_file": token, "target_id": identity, "drafter_version": "1", **SMALL}
    with (
        Server(tiny_target, drafter=tiny_drafter, log=tmp_path / "a.log", **settings) as first,
        Server(tiny_target, drafter=tiny_drafter, log=tmp_path / "b.log", **settings) as second,
    ):
        urls = [first.url, second.url]
        cfg = load(
            None,
            [
                f"work={tmp_path / 'work'}",
                f"target.path={tiny_target}",
                f"rollout.replicas={','.join(urls)}",
                f"rollout.token_file={token}",
                "rollout.poll=0.5",
                "rollout.wait=300",
                "rollout.max_loss=0.3",
                "rollout.max_slice_loss=0.5",
            ],
        )
        answers = complete(urls[0], REQUESTS, 4)
        wanted = {tuple(p): a.text for p, a in zip(LEARNED, answers, strict=True)}
        force(cfg, tiny_drafter)
        assert rollout.run(cfg)["decision"] == "unchanged"
        force(cfg, learned_drafter)
        kill = KillOnce([first, second], monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            rolling = pool.submit(rollout.run, cfg)
            assert kill.done.wait(120), "no replica was asked to swap"
            restart(kill.killed[0])
            with Streams(urls, wanted, clients=8) as streams:
                good = rolling.result()
                served = [Admin(url).status()["active"]["sha256"] for url in urls]
                force(cfg, bad)
                back = rollout.run(cfg)
                again = [Admin(url).status()["active"]["sha256"] for url in urls]
    assert streams.faults == []
    assert good["decision"] == "advanced", good["why"]
    assert served == [drafter_sha256(learned_drafter)] * 2
    assert back["decision"] == "rolled back", back["why"]
    assert again == served
    champion = resolve(cfg, CHAMPION)
    assert champion is not None
    assert champion[0] == "2"
    actions = [row["action"] for row in promotions.read(cfg.table("promotions"))]
    assert actions.count("rollout-canary") == 2
    assert actions.count("rollback") == 1
    pictures = [name for name in cfg.place("rollouts").folders()]
    assert pictures
