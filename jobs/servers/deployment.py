"""Replicas of vLLM behind one endpoint of Ray Serve.

Each Serve replica starts a server of its own (serving.vllm_server: vLLM's OpenAI application with
all middleware, so capture, headers and metrics are as they are without Serve) and passes requests
on. Serve balances, checks health and replaces what has died. A roll-out speaks to the servers
themselves; an actor, the book, knows their addresses.
"""

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jobs.base.config import Config
from jobs.servers.configured import server
from serving.vllm_server import Server

APPLICATION = "flywheel"
BOOK, NAMESPACE = "flywheel-fleet", "flywheel"
DROPPED = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host"}
DROPPED |= {b"date", b"server"}
"""Headers that belong to one connection, and what httpx or Serve sets itself."""
STICKY_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
STICKY_HEADER = {"RAY_SERVE_SESSION_ID_HEADER_KEY": "x-flywheel-conversation"}
"""Environment of Ray in which Serve's router knows conversations by the header of the capture."""
POLL_SECONDS = 1.0
SILENT_SECONDS, RESTART_SECONDS = 60.0, 1800.0
"""A replica that the book has not heard of for so long is gone: without and with a restart."""


@ray.remote(num_cpus=0)
class Book:
    """Which replicas there are, and which drafter a replica has to start with."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.heard: dict[str, float] = {}  # replica -> when it was last heard of
        self.wanted = ""  # number of a version, or none; empty: what the settings say
        self.restarts: dict[str, str] = {}  # replica -> version that it must restart with

    def here(self, name: str, url: str, version: str = "") -> None:
        """A replica serves at `url`; after a restart with a version, later ones start with that."""
        self.wanted = version or self.wanted
        self.restarts.pop(name, None)
        self.ask(name, url)

    def ask(self, name: str, url: str) -> str | None:
        """A replica lives; returns the version that it must restart with, if any."""
        self.urls[name], self.heard[name] = url, time.monotonic()
        return self.restarts.get(name)

    def gone(self, name: str) -> None:
        """A replica has ended."""
        for known in (self.urls, self.heard, self.restarts):
            known.pop(name, None)

    def want(self, name: str, version: str) -> None:
        """A replica restarts with a version (or `none`)."""
        self.restarts[name] = version

    def read(self) -> dict[str, Any]:
        """Everything, without replicas that died unheard."""
        now = time.monotonic()
        for name, heard in list(self.heard.items()):
            if now - heard > (RESTART_SECONDS if name in self.restarts else SILENT_SECONDS):
                self.gone(name)
        return {"urls": dict(self.urls), "wanted": self.wanted, "restarts": dict(self.restarts)}


def read_book(book: Any) -> dict[str, Any]:
    """What the book says now."""
    found: Any = ray.get(book.read.remote())
    return found


class VllmReplica:
    """One replica: a vLLM server of its own, and requests passed on to it.

    A restart with another drafter starts the new server beside the old one, lets the old one end
    its requests, and stops it. Where two do not fit, the new one says so and the old one stays.
    """

    def __init__(self, cfg: Config, token_file: str):
        self.cfg, self.token_file = cfg, token_file
        self.name = serve.get_replica_context().replica_id.unique_id
        self.book: Any = ray.get_actor(BOOK, NAMESPACE)
        self.in_flight: dict[int, int] = {}
        self.formers: list[Server] = []
        self.server = self._start(read_book(self.book)["wanted"])
        self._say()
        threading.Thread(target=self._watch, daemon=True).start()

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back as it comes."""
        if request.url.path.startswith("/flywheel/"):
            return Response("only the replicas themselves answer this", status_code=404)
        async with AsyncExitStack() as open_ones:
            running = self.server
            open_ones.enter_context(_counted(self.in_flight, running.port))
            # No proxy of the environment: the server is on this machine.
            client = httpx.AsyncClient(base_url=running.url, timeout=None, trust_env=False)
            await open_ones.enter_async_context(client)
            headers = [(n, v) for n, v in request.headers.raw if n.lower() not in DROPPED]
            asked = client.build_request(
                request.method,
                httpx.URL(path=request.url.path, query=request.url.query.encode()),
                headers=headers,
                content=await request.body(),
            )
            answer = await client.send(asked, stream=True)
            open_ones.push_async_callback(answer.aclose)
            return _Passed(answer, open_ones.pop_all())

    def check_health(self) -> None:
        """Serve calls this. Raises RuntimeError if the server has died: it replaces the replica."""
        if not self.server.is_running():
            raise RuntimeError(f"vLLM of replica {self.name} has died; log: {self.server.log}")

    def __del__(self) -> None:
        """Serve ends the replica."""
        for one in (self.server, *self.formers):
            one.stop()
        self.book.gone.remote(self.name)

    def _start(self, version: str) -> Server:
        drafter = {"": self.cfg.serve.drafter, "none": ""}.get(version, version)
        cfg = self.cfg.override("serve", port=0, drafter=drafter)
        made = server(cfg, f"fleet-{self.name}-{int(time.time())}.log")
        made.token_file, made.replica = self.token_file, self.name
        # Two servers that each compute on all cores gave 10 tokens/s together, on two cores.
        made.threads = max(1, round(self.cfg.fleet.cpus))
        made.start()
        try:
            made.wait_until_ready()
        except BaseException:
            made.stop()
            raise
        return made

    def _say(self, version: str = "") -> None:
        ray.get(self.book.here.remote(self.name, self.server.url, version))

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 (without this thread the book forgets us)
                print(f"replica {self.name}: {type(error).__name__}: {error}; it is tried again")

    def _look(self) -> None:
        """Tell the book that this replica lives, restart if it says so, and stop former servers
        that have ended their requests.
        """
        for former in [one for one in self.formers if not self.in_flight.get(one.port)]:
            self.formers.remove(former)
            former.stop()
        version: Any = ray.get(self.book.ask.remote(self.name, self.server.url))
        if version is None:
            return
        try:
            former, self.server = self.server, self._start(version)
        except Exception as error:  # noqa: BLE001 (whatever it is, it would come again)
            print(f"replica {self.name} keeps its drafter: {error}")
            self._say()
            return
        self.formers.append(former)  # the next look comes after who has just read `server`
        self._say(version)


class _Passed(StreamingResponse):
    """An answer as it comes from a server. What it needs is closed however it ends, even if the
    client went away before its first part.
    """

    def __init__(self, answer: httpx.Response, open_ones: AsyncExitStack):
        super().__init__(answer.aiter_raw(), status_code=answer.status_code)
        self.raw_headers = [(n, v) for n, v in answer.headers.raw if n.lower() not in DROPPED]
        self.open_ones = open_ones

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.open_ones:
            await super().__call__(scope, receive, send)


@contextmanager
def _counted(counts: dict[int, int], port: int) -> Iterator[None]:
    """Counts what is in flight at one server, for the block."""
    counts[port] = counts.get(port, 0) + 1
    try:
        yield
    finally:
        counts[port] -= 1


def deploy(cfg: Config, token_file: str) -> Any:
    """Start the book and the replicas; returns when all serve. Ray must be connected. Raises
    ValueError if Serve gives up.
    """
    fleet = cfg.fleet
    book = Book.options(name=BOOK, namespace=NAMESPACE, get_if_exists=True).remote()
    read_book(book)  # it lives
    serve.start(http_options={"host": fleet.host, "port": fleet.port})
    router: dict[str, Any] = {"request_router_class": STICKY_ROUTER} if fleet.sticky else {}
    deployment = serve.deployment(
        VllmReplica,
        request_router_config=RequestRouterConfig(**router),
        name="replica",
        num_replicas=fleet.replicas,
        max_ongoing_requests=max(100, 4 * cfg.serve.max_num_seqs),
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=60,
    )
    try:
        serve.run(deployment.bind(cfg, token_file), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(
            f"the replicas did not start ({error}): what vLLM said is in "
            f"{cfg.path('server_logs')}/fleet-*.log"
        ) from error
    return book


def make_token(file: Path) -> Path:
    """A file with a random token that only this user can read; an existing one is kept."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secrets.token_hex(32) + "\n")
    return file
