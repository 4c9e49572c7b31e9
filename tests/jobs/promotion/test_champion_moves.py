"""Changes of the champion under a lease: who waits, and what a holder that comes back can do."""

import json
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest

from dflash.checkpoint import drafter_sha256
from jobs import promote
from jobs.base.config import load
from jobs.promotion import champion_moves
from jobs.promotion.champion_moves import promoting
from jobs.registry.versions import FIELDS, SHA256, Registry
from store.lease import Lost, lease
from tests.helpers.mlflow_server import running
from tests.helpers.promotion import (
    actions,
    aliases,
    evaluate,
    make_drafter,
    make_registry,
    make_target,
    promoted,
)


@pytest.fixture
def cfg(tmp_path, empty_database):
    return make_registry(tmp_path, empty_database)


def test_a_promotion_that_waits_names_the_holder(cfg, monkeypatch):
    monkeypatch.setattr(champion_moves, "lease", partial(lease, wait=0.1))
    with (
        promoting(cfg),
        pytest.raises(ValueError, match=r"another promotion is running: .* is held by .*@"),
        promoting(cfg),
    ):
        pass
    with promoting(cfg):
        pass


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_holder_whose_lease_has_ended_changes_nothing(cfg, taken_over):
    promoted(cfg, "one", 1)
    two = make_drafter(cfg, "two", 2)
    before, known = aliases(cfg), actions(cfg)
    found = {name: Registry(cfg).current(name) for name in before}
    with promoting(cfg) as moves:
        held = moves.decisions.held
        held.release()
        held.until = 0.0  # as after a suspension for longer than the lease
        if taken_over:
            with promoting(cfg) as later:
                later.record("refuse", None, None, "c" * 64, "later", None)
            known = actions(cfg)
        version = found["champion"]
        assert version is not None
        calls = [
            lambda: moves.move("rollback", version, version, "late", None),
            lambda: moves.record("refuse", None, None, "d" * 64, "late", None),
            lambda: moves.registry.set_alias("champion", version),
            lambda: moves.registry.drop_alias("champion", version),
            lambda: moves.registry.mark_bad(version, "late"),
            lambda: moves.registry.register(two, {SHA256: drafter_sha256(two), FIELDS: "{}"}),
        ]
        for call in calls:
            with pytest.raises(Lost, match="run the same command again"):
                call()
    assert (aliases(cfg), actions(cfg)) == (before, known)
    assert Registry(cfg).get("2") is None
    assert not version.bad


SUSPENDED = """
import sys
from dflash.checkpoint import drafter_sha256
from jobs import promote
from jobs.base.config import load
from jobs.promotion import champion_moves
from functools import partial
from store.lease import lease
champion_moves.lease = partial(lease, seconds=3.0)
decide = promote._decide
def wait(*args):
    print("held", flush=True)
    sys.stdin.readline()
    return decide(*args)
promote._decide = wait
print(promote.run(load(None, sys.argv[1:]))["decision"])
"""


@pytest.mark.slow
def test_a_promotion_that_was_suspended_finds_its_lease_gone(cfg, monkeypatch):
    folder, other = make_drafter(cfg, "one", 1), make_drafter(cfg, "two", 2)
    for one in (folder, other):
        evaluate(cfg, one)
    command = [sys.executable, "-c", SUSPENDED, f"work={cfg.work}", f"promote.drafter={folder}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(champion_moves, "lease", partial(lease, wait=30.0))
        summary = promote.run(cfg.override("promote", drafter=str(other)))
        process.send_signal(signal.SIGCONT)
        _, error = process.communicate(b"\n", timeout=60)
    assert summary["decision"] == "promoted"
    assert process.returncode == 1
    assert b"Lost: " in error
    assert aliases(cfg) == {"champion": "1"}
    assert actions(cfg) == [("promote", None, "1")]


@pytest.fixture
def server(tmp_path_factory, empty_database):
    with running(tmp_path_factory.mktemp("server"), empty_database) as url:
        yield url


@pytest.mark.slow
def test_of_two_hosts_that_share_no_file_one_promotes(tmp_path, server, bucket):
    """Both drafters were evaluated when there was no champion. Work is a bucket, the registry a
    server, and each host has its own scratch folder.
    """
    words = [f"work={bucket}", f"mlflow.uri={server}", f"mlflow.model={tmp_path.name}"]
    commands = []
    for seed, name in enumerate(["one", "two"]):
        cfg = load(None, [*words, f"scratch={tmp_path / name}"])
        make_target(cfg)
        folder = make_drafter(cfg, name, seed)
        evaluate(cfg, folder)
        shutil.rmtree(folder)
        named = f"{bucket}/drafters/{name}"
        commands.append([sys.executable, "-m", "jobs.promote", named, *words])
        commands[-1].append(f"scratch={cfg.scratch}")
    racers = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for c in commands]
    outputs = [racer.communicate(timeout=250) for racer in racers]
    assert sorted(r.returncode for r in racers) == [0, 1], outputs
    found = {json.loads(out.splitlines()[-1])["decision"] for out, _ in outputs}
    assert found == {"promoted", "held"}  # it was compared with no drafter
    assert [action for action, _, _ in actions(cfg)] == ["promote", "hold"]
    stages = cfg.table("stages").read(["stage", "ok"]).to_pylist()
    assert sorted(row["ok"] for row in stages) == [False, True]
    [champion] = {number for _, _, number in actions(cfg)[:1]}
    assert aliases(cfg)["champion"] == champion
