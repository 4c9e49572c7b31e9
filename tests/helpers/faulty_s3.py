"""A proxy before an S3 server that fails on demand: errors, cut connections, silence, refusals."""

import json
import math
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from tests.helpers.s3 import S3

Kind = Literal["slow down", "denied", "cut", "lost answer", "half answer", "freeze"]
ERRORS = {
    "slow down": (503, "SlowDown", "Please reduce your request rate."),
    "denied": (403, "AccessDenied", "Access Denied."),
}
# They belong to one connection, and each side of the proxy has its own.
OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "expect"}
PIECE = 1 << 16
ROOT = Path(__file__).parents[2]


@dataclass
class Fault:
    """What happens to which requests: the next `requests` of them, until `end` (monotonic s)."""

    kind: str
    requests: float
    end: float
    methods: Sequence[str]
    under: str
    healed: threading.Event = field(default_factory=threading.Event)

    def hits(self, method: str, path: str) -> bool:
        return (
            self.requests > 0
            and time.monotonic() < self.end
            and (not self.methods or method in self.methods)
            and self.under in path
        )


class FaultyS3(S3):
    """An S3 server as seen through the proxy, which does nothing until told to `fail`.

    The proxy is a process of its own: a client that holds Python's lock while it waits for the
    network, as deltalake's file handler does, would wait for ever for a thread beside it.
    """

    def __init__(self, endpoint: str, process: subprocess.Popen) -> None:
        super().__init__(endpoint)
        self._process = process

    def fail(
        self,
        kind: Kind,
        *,
        requests: float = math.inf,
        seconds: float = math.inf,
        methods: tuple[str, ...] = (),
        under: str = "",
    ) -> None:
        """Let requests fail until one of the limits is reached or `heal` is called.

        Args:
            kind: "slow down" answers 503 and "denied" 403, as S3 does; "cut" closes the connection
                before the server has heard anything, "lost answer" when it has done the work,
                "half answer" in the middle of the body; "freeze" holds requests, and lets them
                through when the time is over.
            requests: that many, of those that match.
            seconds: from now on.
            methods: of these, as ("PUT",); all if empty.
            under: whose decoded path and query have this in them, as "/features/".
        """
        self._tell("fail", kind, requests, seconds, methods, under)

    def heal(self) -> None:
        """Forget all faults; what is frozen goes on."""
        self._tell("heal")

    def seen(self) -> list[tuple[str, str, Kind | None]]:
        """(method, decoded path and query, fault) of every request, in the order of arrival."""
        return [tuple(request) for request in self._tell("seen")]

    def _tell(self, *command: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def faulty(server: S3) -> Iterator[FaultyS3]:
    """A proxy before `server` on a port of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, urlsplit(server.endpoint).netloc],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin
    assert process.stdout
    try:
        yield FaultyS3(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        process.stdin.close()
        process.wait()


class Faults:
    """In the process of the proxy: what is to fail, and what was seen."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, str, str | None]] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def fail(self, kind: str, requests: float, seconds: float, methods: list, under: str) -> None:
        fault = Fault(kind, requests, time.monotonic() + seconds, methods, under)
        with self._lock:
            self._faults.append(fault)

    def heal(self) -> None:
        with self._lock:
            for fault in self._faults:
                fault.healed.set()
            self._faults.clear()

    def seen(self) -> list[tuple[str, str, str | None]]:
        with self._lock:
            return list(self._seen)

    def next(self, method: str, path: str) -> Fault | None:
        """The first fault that hits the request, which counts against it."""
        with self._lock:
            found = next((fault for fault in self._faults if fault.hits(method, path)), None)
            if found:
                found.requests -= 1
            self._seen.append((method, path, found.kind if found else None))
            return found


class Forward(BaseHTTPRequestHandler):
    """Hands a request on with all its headers: the signature covers the Host the client saw."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    target: str
    faults: Faults

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone
            super().handle()

    def handle_one(self) -> None:
        body = self.body()
        fault = self.faults.next(self.command, unquote(self.path))
        if fault is None:
            self.forward(body)
        elif fault.kind in ERRORS:
            self.refuse(*ERRORS[fault.kind])
        elif fault.kind == "cut":
            self.cut()
        elif fault.kind == "freeze":
            left = fault.end - time.monotonic()
            fault.healed.wait(None if math.isinf(left) else left)
            self.forward(body)
        else:
            self.forward(body, fault.kind)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def forward(self, body: bytes, fault: str | None = None) -> None:
        connection = HTTPConnection(self.target)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in OF_ONE_CONNECTION:
                connection.putheader(name, value)
        chunked = "transfer-encoding" in self.headers
        if chunked:
            connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders(body, encode_chunked=chunked)
        response = connection.getresponse()
        if fault == "lost answer":
            response.read()
            self.cut()
        else:
            self.answer(response, half=fault == "half answer")
        connection.close()

    def answer(self, response: HTTPResponse, half: bool) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in OF_ONE_CONNECTION | {"content-length"}:
                self.send_header(name, value)
        length = response.getheader("content-length")
        body = b"" if length else response.read()
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        left = int(response.length or 0) // (2 if half else 1)
        while left and (piece := response.read(min(left, PIECE))):
            self.wfile.write(piece)
            left -= len(piece)
        if half:
            self.cut()

    def refuse(self, status: int, code: str, message: str) -> None:
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        ).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        # With a reset: the client must not take it for an end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(target: str) -> None:
    """Print the port, then obey the commands on stdin until it ends."""
    Forward.target, Forward.faults = target, Faults()
    with ThreadingHTTPServer(("127.0.0.1", 0), Forward) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        print(http.server_port, flush=True)
        for line in sys.stdin:
            name, *values = json.loads(line)
            print(json.dumps(getattr(Forward.faults, name)(*values)), flush=True)
        Forward.faults.heal()
        http.shutdown()


if __name__ == "__main__":
    serve(sys.argv[1])
