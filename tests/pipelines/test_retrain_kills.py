"""A retrain of real stages that is killed at random moments, started twice, or has a full disk."""

import json
import os
import random
import shutil
import signal
import time

import pytest

from jobs.base.config import Config, load
from pipelines import retrain
from store import windows
from store.lease import held_leases
from tests.helpers.retrain_process import (
    Commands,
    add_log,
    check_consistent,
    check_files,
    make_work,
)
from tests.helpers.retraining import last

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KILLS, SEED = 10, 16


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    with Commands(tmp_path_factory.mktemp("commands")) as found:
        yield found


@pytest.fixture
def words(commands, tmp_path, empty_database):
    found = make_work(tmp_path)
    shutil.copy(empty_database, tmp_path / "work" / "mlflow.db")
    return found


def done(commands: Commands, words: list[str]) -> float:
    """Run a command to its end; returns its seconds."""
    started = time.monotonic()
    code, said = commands.run(words)
    assert code == 0, said
    return time.monotonic() - started


def test_killed_at_ten_random_moments_and_run_again(commands, words):
    """SIGKILL at any moment of windows of real stages; the same command goes on. Where a window
    ends, new traffic begins the next one.
    """
    cfg, luck, moments = load(None, words), random.Random(SEED), []
    killed_in_mlflows_first_start(commands, words, cfg)
    longest = done(commands, words)
    more_traffic(cfg)
    while len(moments) < KILLS:
        after = luck.uniform(0.0, longest)
        if commands.killed(words, after):
            moments.append(f"{after:.2f} s: {where(cfg)}")
        else:
            more_traffic(cfg)
    print(f"seed {SEED}, of {longest:.1f} s, killed at", *moments, sep="\n  ", flush=True)
    for _ in range(2):  # the open window, and what came after it had begun
        done(commands, words)
    check_consistent(cfg)
    version = cfg.table("windows").version()
    done(commands, words)
    assert cfg.table("windows").version() == version, "nothing was left to do"


def killed_in_mlflows_first_start(commands: Commands, words: list[str], cfg: Config) -> None:
    """It makes its tables for seconds. With only some of them, no later command could open them."""
    cfg.path("mlflow.db").unlink()
    process, new = commands.start(words), cfg.path(".mlflow.db.new")
    while not (new.exists() and new.stat().st_size > 50_000):
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    assert commands.code(process) == -signal.SIGKILL
    assert not cfg.path("mlflow.db").exists()


def more_traffic(cfg: Config) -> None:
    add_log(cfg.path(), 1000 * len(windows.read(cfg.table("windows"))), 24)


def where(cfg: Config) -> str:
    """How far the last window has come, as its rows say."""
    found = windows.read(cfg.table("windows"))
    steps = [f"{name} {row['state']}" for name, row in found[-1].rows.items()] if found else []
    return f"window {len(found)}, {steps[-1] if steps else 'not begun'}"


def test_of_two_at_the_same_time_one_runs_and_the_other_names_it(commands, words):
    cfg = load(None, words)
    first = commands.start(words)
    while not held_leases(cfg.place("leases")):
        time.sleep(0.01)
    code, said = commands.run(words)
    assert code == retrain.BUSY, said
    assert f"process {first}" in json.loads(said.splitlines()[-1])["held_by"]
    assert commands.code(first) == 0, commands.said(first)
    check_consistent(cfg)


def test_a_disk_that_is_full_is_one_message_and_the_same_command_goes_on(commands, words):
    """With ever more room, later stages meet its end."""
    cfg = load(None, words)
    cfg.path("mlflow.db").unlink()  # it is made with no room for all its tables
    for most, met in ((10_000, "/traffic/"), (60_000, "/features/"), (100_000, "/mlflow.db")):
        code, said = commands.run(words, most)
        message = said.splitlines()[-1]
        assert (code, met in message) == (2, True), said
        assert "run the same command again" in message
        check_files(cfg)
    assert last(cfg).whole["reason"].startswith("train: MLflow at")
    done(commands, words)
    check_consistent(cfg)
