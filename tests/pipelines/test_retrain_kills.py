"""A retrain of real stages that is killed at random moments, started twice, or has a full disk."""

import json
import random
import shutil
import time
from functools import partial

import pytest

from jobs.base.config import Config, load
from pipelines import retrain
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
STEPS = ["ingest", "select", "harvest", "train", "evaluate", "promote"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    with Commands(tmp_path_factory.mktemp("commands")) as found:
        yield found


@pytest.fixture
def words(commands, tmp_path, empty_database):
    found = make_work(tmp_path)
    shutil.copy(empty_database, tmp_path / "work" / "mlflow.db")
    return found


def done(commands: Commands, words: list[str]) -> None:
    """Run a command to its end."""
    code, said = commands.run(words)
    assert code == 0, said


@pytest.mark.long
def test_killed_at_ten_random_moments_and_run_again(commands, words):
    """SIGKILL somewhere in a random step of windows of real stages; the same command goes on. Where
    a window ends, new traffic begins the next one.
    """
    cfg, luck, moments = load(None, words), random.Random(SEED), []
    killed_in_mlflows_first_start(commands, words, cfg)
    done(commands, words)
    seconds = {step: last(cfg).rows[step]["seconds"] for step in STEPS}
    while len(moments) < KILLS:
        add_log(cfg.path(), 1000 * last(cfg).number, 24)
        for step in sorted(luck.sample(STEPS, KILLS // 2), key=STEPS.index):
            number, after = last(cfg).number, luck.uniform(0.0, seconds[step])
            here = partial(is_at, cfg, step, number + (last(cfg).state == "promoted"))
            if not commands.killed(words, here, after):
                break  # it was faster; so the window has ended
            moments.append(f"{step}, {after:.2f} s: window {last(cfg).number} {last(cfg).state}")
        done(commands, words)
    print(f"seed {SEED}, killed in", *moments, sep="\n  ", flush=True)
    check_consistent(cfg)
    assert last(cfg).number > 1
    version = cfg.table("windows").version()
    done(commands, words)
    assert cfg.table("windows").version() == version, "nothing was left to do"


def is_at(cfg: Config, step: str, number: int) -> bool:
    """Whether a window has come to a step, or is past it; ingest has no row while it runs."""
    window = last(cfg)
    return step == "ingest" or (window.number == number and step in window.rows)


def killed_in_mlflows_first_start(commands: Commands, words: list[str], cfg: Config) -> None:
    """It makes its tables for seconds. With only some of them, no later command could open them."""
    cfg.path("mlflow.db").unlink()
    new = cfg.path(".mlflow.db.new")
    assert commands.killed(words, lambda: new.exists() and new.stat().st_size > 50_000)
    assert not cfg.path("mlflow.db").exists()


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
