"""`flywheel fleet` with real vLLM servers behind a real Ray Serve."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash.checkpoint import drafter_sha256
from serving.vllm_server import SERVED_NAME

pytest.importorskip("vllm")
pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

ASKED = {"model": SERVED_NAME, "prompt": [0, 5, 9, 20], "max_tokens": 16, "temperature": 0}


def wait_for(what, seconds: float = 600.0) -> Any:
    """The first true value of `what()`."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.5)
    return found


@pytest.fixture
def fleet(tiny_target, tiny_drafter, tmp_path):
    """A fleet of two; gives (endpoint, its state file, the process)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "work": tmp_path,
        "target.path": tiny_target,
        "target.dtype": "float32",
        "serve.drafter": tiny_drafter,
        "serve.max_model_len": 128,
        "serve.kv_cache_gib": 1,
        "serve.capture": tmp_path / "capture",
        "fleet.port": port,
        "fleet.cpus": 0.5,
        "fleet.sticky": "true",
    }
    command = [sys.executable, "-m", "jobs.fleet", *(f"{k}={v}" for k, v in settings.items())]
    with (tmp_path / "fleet.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", tmp_path / "fleet_state.json", process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def read_state(file: Path) -> list[str]:
    """The URLs of both replicas, once both serve."""
    if not file.is_file():
        return []
    urls = json.loads(file.read_text())["replicas"]
    return urls if len(urls) == 2 else []


def test_a_fleet_serves_and_replaces_what_dies(fleet, tiny_drafter, tmp_path):
    endpoint, file, process = fleet
    urls = wait_for(lambda: read_state(file))
    state = json.loads(file.read_text())
    token = Path(state["token_file"])
    assert token.stat().st_mode & 0o077 == 0
    admin = {"Authorization": f"Bearer {token.read_text().strip()}"}
    expected = f"{tiny_drafter.name}/{drafter_sha256(tiny_drafter)[:12]}"
    texts = set()
    for stream in (False, True):
        asked, url = ASKED | {"stream": stream}, endpoint + "/v1/completions"
        with httpx.stream("POST", url, json=asked, timeout=60) as answer:
            assert answer.status_code == 200
            assert answer.headers["x-flywheel-drafter"] == expected
            body = "".join(answer.iter_text())
        parts = body.split("data: ")[1:-1] if stream else [body]
        texts.add("".join(json.loads(part)["choices"][0]["text"] for part in parts))
    assert len(texts) == 1
    assert httpx.get(endpoint + "/flywheel/replica", headers=admin).status_code == 404
    assert httpx.get(urls[0] + "/flywheel/replica").status_code == 401
    found = [httpx.get(url + "/flywheel/replica", headers=admin).json() for url in urls]
    assert len({one["replica"] for one in found}) == 2
    assert {one["active"]["sha256"] for one in found} == {drafter_sha256(tiny_drafter)}
    check_sticky(endpoint, urls, admin)

    kill_server(urls[0])
    again = wait_for(lambda: [url for url in read_state(file) if url not in urls])
    assert httpx.get(again[0] + "/flywheel/replica", headers=admin).json()["state"] == "ready"
    answers = [httpx.post(endpoint + "/v1/completions", json=ASKED, timeout=60) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not file.exists()
    assert not any(answers_at(url) for url in [*urls, *again]), "servers outlive their fleet"
    assert len([*(tmp_path / "capture").iterdir()]) >= 2, "each replica has a file of its own"


def check_sticky(endpoint: str, urls: list[str], admin: dict[str, str]) -> None:
    """Check that each conversation stays with one replica, and that both have some."""
    for number in range(32):
        conversation = {"X-Flywheel-Conversation": f"c{number % 16}"}
        answer = httpx.post(endpoint + "/v1/completions", json=ASKED, headers=conversation)
        assert answer.status_code == 200
    seen = []
    for url in urls:
        rows = httpx.get(url + "/flywheel/acceptance?after=0", headers=admin).json()["rows"]
        seen.append({row["conversation_id"] for row in rows if row["conversation_id"]})
    assert all(seen)
    assert not seen[0] & seen[1]
    assert sum(map(len, seen)) == 16


def kill_server(url: str) -> None:
    """SIGKILL the process that listens there."""
    port = url.rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serving.launch" in words and port.encode() in words:
            os.kill(int(folder.name), signal.SIGKILL)


def answers_at(url: str) -> bool:
    """Whether a server listens there."""
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
