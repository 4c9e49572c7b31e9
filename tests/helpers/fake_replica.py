"""A replica that only speaks the protocol: HTTP, no engine, drafters of known acceptance.

It answers as serving/replica.py does. Every look at its acceptance rows finishes `per_look` more
requests, drawn with the true chance of the active drafter. Faults are planted by name in `faults`.
"""

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dflash.checkpoint import drafter_sha256

TOKEN = "s3cret-of-the-fleet"


@dataclass
class FakeReplica:
    """State of one replica. `chances[sha256][domain]`: true chance of each draft."""

    name: str
    target_id: str
    chances: dict[str, dict[str, float]]
    active: dict[str, Any] | None = None
    domains: tuple[str, ...] = ("a", "b")
    k: int = 3
    per_look: int = 40
    fail_share: dict[str, float] = field(default_factory=dict)  # of requests, by sha256
    faults: set[str] = field(default_factory=set)
    url: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lock = threading.Lock()
        self.calls: list[str] = []
        self.loaded: list[str] = []
        self.on_restart = self.active  # what a new process begins with
        self.restart(count=False)

    def restart(self, count: bool = True) -> None:
        """A new process: nothing staged, counters at zero, the drafter of its start."""
        if count:
            self.active = self.on_restart
        self.staged: dict[str, Any] | None = None
        self.swaps = self.refused = self.seq = self.failed = 0
        self.rows: list[dict[str, Any]] = []
        self.started = time.time() + self.random.random()
        self.files = Path(tempfile.mkdtemp())

    @property
    def sha(self) -> str:
        return self.active["sha256"] if self.active else ""

    def status(self) -> dict[str, Any]:
        return {
            "replica": self.name,
            "state": "ready",
            "target_id": self.target_id,
            "k": [self.k],
            "active": self.active,
            "staged": self.staged,
            "swaps": self.swaps,
            "refused": self.refused,
            "fault": "",
            "started_at": "2026-01-01T00:00:00+00:00",
        }

    def load(self, version: str, sha: str) -> tuple[int, dict[str, Any]]:
        if "restart" in self.faults:
            return 409, {"error": "another shape", "restart": True}
        if "refuse" in self.faults:
            return 422, {"error": "it can never be served here"}
        folder = self.files / sha
        found = drafter_sha256(folder)
        if found != sha:
            return 409, {"error": f"the files are {found[:12]}"}
        config = json.loads((folder / "config.json").read_text())
        self.loaded.append(sha)
        compat = {"target_id": self.target_id, "block_size": config.get("block_size")}
        self.staged = {"version": version, "sha256": sha, "compat": compat, "tensors": 1}
        self.staged["parameters_sha256"] = sha[::-1]
        return 200, {"staged": self.staged}

    def activate(self, sha: str) -> tuple[int, dict[str, Any]]:
        if "verify" in self.faults and sha:
            return 500, {"error": "the probe drafts differ: the old weights are back"}
        if sha and (self.staged is None or self.staged["sha256"] != sha):
            return 409, {"error": "it is not staged"}
        if "wrong" not in self.faults:
            self.active = self.staged if sha else None
        self.staged, self.swaps = None, self.swaps + 1
        return 200, {"active": self.active, "pause_seconds": 0.01}

    def finish_requests(self, count: int) -> None:
        for _ in range(count):
            if self.random.random() < self.fail_share.get(self.sha, 0.0):
                self.failed += 1
                continue
            self.seq += 1
            domain = self.domains[self.seq % len(self.domains)]
            rounds = 12
            accepted, drafted = [], []
            if self.active:
                chance = self.chances[self.sha]
                p = chance.get(domain, chance.get("", 0.5))
                for _ in range(rounds):
                    hits = 0
                    while hits < self.k and self.random.random() < p:
                        hits += 1
                    accepted.append(hits)
                    drafted.append(self.k)
            tokens = sum(accepted) + rounds + 1
            now = time.time()
            self.rows.append(
                {
                    "seq": self.seq,
                    "request_id": f"{self.name}-{self.started}-{self.seq}",
                    "started_at": now - 1,
                    "finished_at": now,
                    "seconds": tokens * self.random.uniform(0.01, 0.02),
                    "drafter_version": self.active["version"] if self.active else "",
                    "drafter_sha256": self.sha,
                    "domain": domain,
                    "conversation_id": f"{self.name}-{self.started}-{self.seq // 2}",
                    "tenant": None,
                    "temperature": 0.0,
                    "k": self.k,
                    "accepted": accepted,
                    "drafted": drafted,
                    "prompt_tokens": 10,
                    "output_tokens": tokens,
                    "finish_reason": "stop",
                    "first_token_seconds": self.random.uniform(0.1, 0.2),
                    "concurrency": 4,
                }
            )
        self.rows = self.rows[-4096:]

    def acceptance(self, after: int) -> dict[str, Any]:
        self.finish_requests(self.per_look)
        rows = [row for row in self.rows if row["seq"] > after]
        return {
            "rows": rows,
            "next": self.seq,
            "lost": 0,
            "requests": self.seq + self.failed,
            "failed": self.failed,
            "started": self.started,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeReplica

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _handle(self) -> None:
        fake = self.fake
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self._chunks()
        path, _, query = self.path.partition("?")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "a token is needed"})
        with fake.lock:
            fake.calls.append(f"{self.command} {path}")
            what = path.rpartition("/")[2]
            if f"die-{what}" in fake.faults:  # the process ends, and a supervisor starts it again
                if "again" not in fake.faults:
                    fake.faults.discard(f"die-{what}")
                fake.restart()
                self.close_connection = True
                return None
            if "hang" in fake.faults or f"hang-{what}" in fake.faults:
                time.sleep(1.0)
                self.close_connection = True
                return None
            if self.command == "PUT":
                _, _, _, sha, name = path.split("/")
                (fake.files / sha).mkdir(exist_ok=True)
                (fake.files / sha / name).write_bytes(body)
                return self._answer(200, {"bytes": len(body), "sha256": ""})
            if what == "replica":
                return self._answer(200, fake.status())
            if what == "acceptance":
                return self._answer(200, fake.acceptance(int(query.partition("=")[2])))
            given = json.loads(body or b"{}")
            if what == "load":
                return self._answer(*fake.load(given["version"], given["sha256"]))
            if what == "activate":
                return self._answer(*fake.activate(given["sha256"]))
            if what == "drop":
                fake.staged = None
                return self._answer(200, {})
        return self._answer(404, {"error": "no such path"})

    def _chunks(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    do_GET = do_PUT = do_POST = _handle


@contextmanager
def running(*fakes: FakeReplica, one_port: bool = False) -> Iterator[list[str]]:
    """Serve the replicas; gives their URLs. `one_port`: as pods do, addresses 127.0.0.1, 127.0.0.2
    ... of one port.
    """
    servers = []
    port = 0
    for number, fake in enumerate(fakes, 1):
        handler = type("Handler", (_Handler,), {"fake": fake})
        host = f"127.0.0.{number if one_port else 1}"
        server = ThreadingHTTPServer((host, port), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        fake.url = f"http://{host}:{server.server_address[1]}"
        port = server.server_address[1] if one_port else 0
        servers.append(server)
    try:
        yield [fake.url for fake in fakes]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
