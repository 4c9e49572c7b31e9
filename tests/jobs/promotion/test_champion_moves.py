"""Changes of the champion under a lease: who waits, and what a holder that comes back can do."""

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
from tests.helpers.promotion import (
    actions,
    aliases,
    evaluate,
    make_drafter,
    make_target,
    promoted,
)


@pytest.fixture
def cfg(tmp_path, empty_database):
    config = load(None, [f"work={tmp_path}"])
    shutil.copy(empty_database, config.path("mlflow.db"))
    make_target(config)
    return config


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
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, **pipes) as process:
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
