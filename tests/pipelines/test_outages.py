"""A retrain while a service is away or the disk is full: one message, and the same command goes on
where it stopped. Stages that no fault meets are stand-ins; servers, tables and leases are real.
"""

import os
import threading
import time
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from jobs import promote
from jobs.base import cli
from jobs.base.config import Config, load
from pipelines import retrain
from store import arrow_files, place, tables
from store.lease import lease
from tests.helpers import mlflow_server
from tests.helpers.promotion import actions, aliases, evaluate, make_drafter, make_target
from tests.helpers.retraining import Stages, add_traffic, last, states
from tests.helpers.s3 import Restartable

# Servers that start again take most of their time.
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def stages(monkeypatch):
    monkeypatch.setattr(retrain, "cluster", lambda cfg: nullcontext())
    return Stages(monkeypatch)


@pytest.fixture
def settings(tmp_path):
    gate = tmp_path / "gate.yaml"
    gate.write_text("speed: {required: false}")
    return [f"promote.gate={gate}", "retrain.min_tokens=500", "retrain.mix=0"]


def told(capsys) -> str:
    """The message of the last command."""
    return capsys.readouterr().err.splitlines()[-1]


# The object store.


@pytest.fixture
def bucket_server(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    server = Restartable(tmp_path / "s3")
    for name, value in server.server.env.items():
        monkeypatch.setenv(name, value)
    forget_stores()
    yield server
    server.stop()
    forget_stores()


def forget_stores() -> None:
    """Clients keep the settings that they were opened with."""
    place._store.cache_clear()
    arrow_files.files_of.cache_clear()


def test_a_bucket_that_is_away(bucket_server, stages, settings, tmp_path, monkeypatch, capsys):
    """For a while: the command waits. For longer: one message, and the same command goes on."""
    words = [f"work={bucket_server.server.url()}", f"scratch={tmp_path / 'scratch'}"]
    words += [f"target.path={tmp_path / 'scratch' / 'target'}", *settings]
    cfg = load(None, words)
    make_target(cfg)
    add_traffic(cfg, range(10))

    def away_for_a_while():
        bucket_server.stop()
        threading.Timer(3.0, bucket_server.start).start()

    stages.during["harvest"] = away_for_a_while
    assert retrain.run(cfg)["state"] == "promoted"
    stages.during.clear()
    add_traffic(cfg, range(10, 20), log="later")
    stages.take()
    patience(monkeypatch, 1)
    # It cannot be given back. That of a process that has ended is free at once; this one goes on.
    monkeypatch.setattr(retrain, "lease", partial(lease, seconds=4.0))
    stages.during["train"] = bucket_server.stop
    assert cli.main(["retrain", *words]) == 2
    message = told(capsys)
    assert message.startswith(f"error: {cfg.place('windows')}"), message
    assert "run" in message
    assert "again" in message
    assert stages.take() == ["ingest", "select", "harvest", "train"]
    stages.during.clear()
    patience(monkeypatch, 60)
    bucket_server.start()
    time.sleep(4.0)
    assert cli.main(["retrain", *words]) == 0
    assert stages.take() == ["train", "evaluate", "preflight", "promote"]
    assert states(cfg) == [(1, "promoted"), (2, "promoted")]


def patience(monkeypatch, seconds: int) -> None:
    """How long the clients of a store try again."""
    monkeypatch.setitem(tables.OPTIONS, "retry_timeout", f"{seconds}s")
    monkeypatch.setitem(place.RETRIES, "retry_timeout", timedelta(seconds=seconds))
    forget_stores()


# MLflow.


class Mlflow:
    """A server that can end, as a kill would, and start again on its port with its data."""

    def __init__(self, folder: Path, database: Path) -> None:
        folder.mkdir()
        store = f"sqlite:///{folder}/mlflow.db"
        (folder / "mlflow.db").write_bytes(database.read_bytes())
        self.port, self.running = mlflow_server.free_port(), ExitStack()
        self.args = (folder, self.port, store, str(folder / "artifacts"))
        self.start()

    def start(self) -> None:
        self.url = self.running.enter_context(mlflow_server.serving(*self.args))

    def stop(self) -> None:
        self.running.close()


@pytest.fixture
def mlflow(tmp_path, empty_database):
    server = Mlflow(tmp_path / "mlflow", empty_database)
    yield server
    server.stop()


def before(monkeypatch, name: str, what) -> None:
    """Call `what` once, right before the client calls `name`: where a promotion is half done."""
    from mlflow.tracking import MlflowClient

    real, left = getattr(MlflowClient, name), [what]

    def call(self, *args, **kwargs):
        if left:
            left.pop()()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, name, call)


def test_mlflow_goes_away_in_the_middle_of_a_promotion(
    mlflow, stages, settings, tmp_path, monkeypatch, capsys
):
    """For a while: the client tries again. For longer: one message, nothing is half promoted, and
    the same command completes it.
    """
    words = [f"work={tmp_path / 'work'}", f"mlflow.uri={mlflow.url}", *settings]
    words += ["drafter.taps=0,2", "drafter.block_size=4", "drafter.mask_token_id=49"]
    cfg = load(None, words)
    make_target(cfg)
    real = [one if one[0] != "promote" else ("promote", promote.run) for one in retrain.DELIVER]
    monkeypatch.setattr(retrain, "DELIVER", real)
    first = offer(cfg, stages, "one", 1)

    def away_for_a_while():
        mlflow.stop()
        threading.Timer(2.0, mlflow.start).start()

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")  # tries more often
    before(monkeypatch, "set_registered_model_alias", away_for_a_while)
    assert retrain.run(cfg)["state"] == "promoted"
    assert aliases(cfg) == {"champion": "1"}
    second = offer(cfg, stages, "two", 2, against=first)
    assert second != first
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # its default waits for minutes
        before(patch, "set_registered_model_alias", mlflow.stop)
        assert cli.main(["retrain", *words]) == 2
    message = told(capsys)
    assert f"MLflow at {mlflow.url}" in message
    assert "What to do: start the server, then run the same command again" in message
    assert last(cfg).whole["reason"].startswith("promote: MLflow at")
    assert cli.main(["retrain", *words]) == 2  # it is still away
    assert "does not answer (ConnectionError): start the MLflow server there" in told(capsys)
    mlflow.start()
    stages.take()
    assert cli.main(["retrain", *words]) == 0
    assert stages.take() == []  # only promote was left
    assert aliases(cfg) == {"champion": "2", "previous": "1"}
    assert actions(cfg) == [("promote", None, "1"), ("promote", "1", "2")]
    assert states(cfg) == [(1, "promoted"), (2, "promoted")]


def offer(cfg: Config, stages: Stages, name: str, seed: int, against: Path | None = None) -> Path:
    """New traffic, and the evaluated drafter that its window will have."""
    add_traffic(cfg, range(10 * seed, 10 * seed + 10), log=name)
    folder = make_drafter(cfg, name, seed)
    evaluate(cfg, folder, against=against)
    stages.answers["train"] = {"name": name, "folder": str(folder)}
    return folder
