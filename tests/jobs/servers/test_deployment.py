"""What a replica of the fleet passes on, and what its book knows, without Ray Serve around them."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from jobs import fleet
from jobs.base.config import load
from jobs.servers import deployment
from jobs.servers.deployment import Book, VllmReplica


class _Server(BaseHTTPRequestHandler):
    """Sends a head, waits for `go`, then sends a body of two chunks."""

    protocol_version = "HTTP/1.1"
    go = threading.Event()
    closed = threading.Event()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)  # with the headers Date and Server
        self.send_header("x-flywheel-drafter", "1/abc")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while not self.go.wait(0.02):
                self.wfile.write(b"1\r\n \r\n")
            self.wfile.write(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        except OSError:
            self.closed.set()


class _Replica(VllmReplica):
    def __del__(self) -> None:
        pass


@pytest.fixture
def replica(monkeypatch):
    handler = type("Handler", (_Server,), {"go": threading.Event(), "closed": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    port = server.server_address[1]
    made = object.__new__(_Replica)
    made.server = SimpleNamespace(port=port, url=f"http://127.0.0.1:{port}")  # pyright: ignore[reportAttributeAccessIssue]
    made.in_flight = {}
    made.handler = handler  # pyright: ignore[reportAttributeAccessIssue]
    yield made
    handler.go.set()
    server.shutdown()
    server.server_close()


def _request(scope, receive=None) -> Request:
    async def no_body():
        return {"type": "http.request", "body": b""}

    return Request(scope, receive or no_body)


SCOPE = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": []}
SCOPE |= {"scheme": "http", "server": ("127.0.0.1", 80), "root_path": "", "asgi": {}}


def test_an_answer_is_in_flight_from_the_request_to_its_end(replica):
    """A restart stops the former server once nothing is in flight there."""
    port, sent = replica.server.port, []

    async def send(message):
        assert replica.in_flight == {port: 1}
        sent.append(message)

    async def run():
        answer = await replica(_request(SCOPE))
        assert replica.in_flight == {port: 1}
        replica.handler.go.set()
        await answer(SCOPE, lambda: asyncio.sleep(60), send)

    asyncio.run(run())
    assert replica.in_flight == {port: 0}
    assert b"".join(m.get("body", b"") for m in sent).strip() == b"onetwo"
    names = [name.lower() for name, _ in sent[0]["headers"]]
    assert b"x-flywheel-drafter" in names
    assert not {b"date", b"server"} & set(names), "Serve sets them, and they would stand twice"


def test_a_client_that_goes_before_the_answer_leaves_nothing_open(replica):
    async def gone():
        return {"type": "http.disconnect"}

    async def send(message):
        raise OSError("nobody there")

    async def run():
        answer = await replica(_request(SCOPE))
        await asyncio.gather(answer(SCOPE, gone, send), return_exceptions=True)
        assert replica.in_flight == {replica.server.port: 0}
        assert await asyncio.to_thread(replica.handler.closed.wait, 5), (
            "vLLM would go on for nobody"
        )

    asyncio.run(run())


def test_a_server_that_is_gone_leaves_nothing_in_flight(replica):
    replica.server.url = "http://127.0.0.1:9"
    with pytest.raises(Exception, match="connect"):
        asyncio.run(replica(_request(SCOPE)))
    assert replica.in_flight == {replica.server.port: 0}


class _Started:
    def __init__(self, port: int):
        self.port, self.url, self.stopped = port, f"http://127.0.0.1:{port}", False

    def stop(self) -> None:
        self.stopped = True


def test_a_replica_is_heard_of_while_long_answers_end_at_its_former_server(monkeypatch, book):
    calls = SimpleNamespace(
        **{name: SimpleNamespace(remote=getattr(book, name)) for name in ("ask", "here", "want")}
    )
    monkeypatch.setattr(deployment.ray, "get", lambda found: found)
    made = object.__new__(_Replica)
    former, fresh = _Started(1), _Started(2)
    made.name, made.book, made.server, made.formers = "a", calls, former, []  # pyright: ignore[reportAttributeAccessIssue]
    made.in_flight = {1: 1}
    made._start = lambda version: fresh  # pyright: ignore[reportAttributeAccessIssue]
    made._look()
    book.want("a", "7")
    made._look()
    assert (made.server, former.stopped) == (fresh, False)
    now = time.monotonic()
    for later in range(50, 500, 50):
        monkeypatch.setattr(deployment.time, "monotonic", lambda later=later: now + later)
        made._look()
        assert book.read()["urls"] == {"a": fresh.url}
    assert not former.stopped
    made.in_flight[1] = 0
    made._look()
    assert former.stopped


def test_a_book_that_is_away_does_not_end_the_watch(monkeypatch):
    made, looks = object.__new__(_Replica), []
    made.name = "a"

    def look():
        looks.append(1)
        raise RuntimeError("the actor died") if len(looks) < 3 else SystemExit

    made._look = look
    monkeypatch.setattr(deployment.time, "sleep", lambda _: None)
    with pytest.raises(SystemExit):
        made._watch()
    assert len(looks) == 3


@pytest.fixture
def book():
    actor: Any = Book
    return actor.__ray_metadata__.modified_class()


def test_a_restart_that_failed_is_not_what_later_replicas_start_with(book):
    book.here("a", "http://a")
    book.want("a", "7")
    assert book.ask("a", "http://a") == "7"
    assert book.read()["wanted"] == ""
    book.here("a", "http://a")  # it keeps its drafter
    assert (book.read()["wanted"], book.ask("a", "http://a")) == ("", None)
    book.want("a", "7")
    book.here("a", "http://a2", "7")
    assert (book.read()["wanted"], book.read()["urls"]) == ("7", {"a": "http://a2"})


def test_a_replica_that_died_unheard_is_forgotten(book, monkeypatch):
    now = time.monotonic()
    for name in ("dies", "lives", "restarts"):
        book.here(name, f"http://{name}")
    book.want("restarts", "7")
    monkeypatch.setattr(deployment.time, "monotonic", lambda: now + 100)
    book.ask("lives", "http://lives")
    assert set(book.read()["urls"]) == {"lives", "restarts"}
    book.ask("dies", "http://dies")  # it was only slow
    assert set(book.read()["urls"]) == {"lives", "restarts", "dies"}


def test_what_is_asked_for_meanwhile_is_not_lost(tmp_path, monkeypatch):
    """`rollout` asks for another restart right when the file is read."""
    cfg = load(None, [f"work={tmp_path}"])
    file = cfg.path("fleet_wanted.json")
    first, second = (
        json.dumps({"replicas": {f"http://{name}": {"version": name, "sha256": "1"}}})
        for name in ("7", "8")
    )
    whole, wanted = json.loads, []

    def loads(text):
        file.write_text(second)
        monkeypatch.setattr(fleet.json, "loads", whole)
        return whole(text)

    monkeypatch.setattr(fleet.json, "loads", loads)
    monkeypatch.setattr(fleet.ray, "get", lambda found: found)
    book = SimpleNamespace(
        read=SimpleNamespace(
            remote=lambda: {"urls": {name: f"http://{name}" for name in ("7", "8")}}
        ),
        want=SimpleNamespace(remote=lambda *asked: wanted.append(asked)),
    )
    file.write_text(first)
    for _ in range(3):
        fleet._restart_wanted(cfg, book)
    assert wanted == [("7", "7"), ("8", "8")]
