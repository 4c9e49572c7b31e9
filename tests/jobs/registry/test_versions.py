"""The registry behind promotion: a real MLflow server, any names, old versions, broken files."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from mlflow.tracking import MlflowClient

from dflash.checkpoint import WEIGHTS, drafter_sha256, file_sha256
from jobs import promote, rollback
from jobs.base import cli
from jobs.base.config import load
from jobs.evaluation import drafters
from jobs.promotion.candidate import read_candidate
from jobs.registry import versions
from jobs.registry.versions import FIELDS, OLD_SHA256, SHA256, Registry
from jobs.servers import configured
from jobs.tracking import mlflow_client
from jobs.tracking.mlflow_client import MlflowFault
from jobs.tracking.mlflow_runs import Tracker, attach, metric_name
from store.lease import who
from tests.helpers import promotion
from tests.helpers.mlflow_server import running
from tests.helpers.promotion import (
    aliases,
    make_drafter,
    make_registry,
    make_target,
    opened,
    promoted,
)
from tests.helpers.work import RIVAL_SETTINGS

HOSTILE = [
    "/",
    "'",
    '"',
    'o\'brien "q"',
    "[/b]",
    r"$\foo$",
    "a\nb",
    "x" * 10_000,
    "\U0001f600",
    "\\",
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder in which the server keeps everything."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(kept, empty_database):
    with running(kept, empty_database) as url:
        yield url


@pytest.fixture
def cfg(tmp_path, empty_database):
    return make_registry(tmp_path, empty_database)


@pytest.fixture
def remote(tmp_path, server):
    """A work folder with a model of its own on the server; its name is hard to quote."""
    config = load(
        None, [f"work={tmp_path}", f"mlflow.uri={server}", f'mlflow.model=o\'{tmp_path.name} "1"']
    )
    make_target(config)
    return config


def test_promotion_through_a_server(remote):
    """A server refuses a local path as source of a version (`Invalid model version source`).
    Promote, look up as serve does,
    roll back, promote again.
    """
    first, summary = promoted(remote, "one", 1)
    assert (summary["decision"], summary["version"]) == ("promoted", "1")
    second, _ = promoted(remote, "two", 2, against=first)
    for folder in (first, second):
        shutil.rmtree(folder)
    found, version = configured._drafter(remote.override("serve", drafter="champion"))
    assert version == "2"
    assert found is not None
    assert found.is_relative_to(remote.path("downloads"))
    other = replace(remote, work=str(remote.path("another-machine")))
    assert opened(other, "champion")[1].name == "two"
    assert rollback.run(remote)["version"] == "1"
    assert aliases(remote) == {"champion": "1", "previous": "2"}
    _, summary = promoted(remote, "two", 2, against=opened(remote, "1")[1])
    assert "was rolled back" in summary["reasons"][0]
    third, summary = promoted(remote, "three", 3, against=opened(remote, "1")[1])
    assert (summary["decision"], summary["version"]) == ("promoted", "3")
    source = Registry(remote).client.get_model_version(remote.mlflow.model, "3").source
    assert str(source).startswith("mlflow-artifacts:/")
    assert drafter_sha256(opened(remote, "champion")[1]) == drafter_sha256(third)


def test_the_download_is_verified_each_time_and_fetched_anew_if_it_changed(remote, kept):
    promoted(remote, "one", 1)
    folder = opened(remote, "champion")[1]
    (folder / WEIGHTS).write_bytes(b"rotten")
    assert opened(remote, "champion")[1] == folder
    assert (folder / WEIGHTS).stat().st_size > 100
    version = Registry(remote).client.get_model_version(remote.mlflow.model, "1")
    (stored,) = kept.rglob(f"{str(version.source).split(':/')[1]}/{WEIGHTS}")
    stored.write_bytes(b"rotten")
    (folder / WEIGHTS).write_bytes(b"rotten")
    with pytest.raises(ValueError, match="holds another drafter than was registered"):
        versions.resolve(remote, "champion")


@pytest.mark.parametrize("where", ["cfg", "remote"])
def test_an_interrupted_upload_is_finished_by_the_next_run(where, request, monkeypatch):
    """Until the artifacts are uploaded and verified, there is neither a version nor a model."""
    cfg = request.getfixturevalue(where)
    folder = make_drafter(cfg, "one", 1)
    promotion.evaluate(cfg, folder)
    real, sent = MlflowClient.log_artifact, []

    def cut(self, run_id, path, where):
        sent.append(path)
        if len(sent) == 2:
            raise KeyboardInterrupt
        real(self, run_id, path, where)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", cut)
        with pytest.raises(KeyboardInterrupt):
            promote.run(cfg)
    client = Registry(cfg).client
    assert [m.name for m in client.search_registered_models() if m.name == cfg.mlflow.model] == []
    assert promote.run(cfg)["decision"] == "promoted"
    assert drafter_sha256(opened(cfg, "champion")[1]) == drafter_sha256(folder)


def test_artifacts_that_were_lost_are_written_again_when_the_drafter_is_promoted_again(cfg):
    """Promote once said `unchanged` about a champion that no server could open."""
    folder, _ = promoted(cfg, "one", 1)
    (opened(cfg, "champion")[1] / WEIGHTS).unlink()
    promotion.evaluate(cfg, folder)
    again = cfg.override("promote", drafter=str(folder))
    assert promote.run(again)["decision"] == "unchanged"
    assert drafter_sha256(opened(cfg, "champion")[1]) == drafter_sha256(folder)
    (opened(cfg, "champion")[1] / WEIGHTS).unlink()
    other = shutil.copytree(folder, folder.with_name("copy"))
    promotion.evaluate(cfg, other)
    with pytest.raises(ValueError, match=r"version 1 .*gone or damaged.*name the folder one, as"):
        promote.run(cfg.override("promote", drafter=str(other)))


def test_a_store_that_changes_what_it_gets_registers_nothing(cfg, monkeypatch, capsys):
    folder = make_drafter(cfg, "one", 1)
    promotion.evaluate(cfg, folder)
    monkeypatch.setattr(MlflowClient, "log_artifact", lambda *_: None)
    assert cli.main(["promote", str(folder), f"work={cfg.work}"]) == 2
    assert "holds no drafter after the upload of" in capsys.readouterr().err
    assert Registry(cfg).client.search_registered_models() == []


def test_a_server_that_is_gone_is_one_message(tmp_path, capsys):
    cfg = load(None, [f"work={tmp_path}", "mlflow.uri=http://me:secret@127.0.0.1:9"])
    make_target(cfg)
    promotion.evaluate(cfg, make_drafter(cfg, "one", 1))
    assert cli.main(["promote", f"work={tmp_path}", f"mlflow.uri={cfg.mlflow_uri}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "http://127.0.0.1:9 does not answer (ConnectionError): start the MLflow" in line


def refused(error):
    with pytest.raises(MlflowFault) as caught, mlflow_client.told("http://h"):
        raise error
    return str(caught.value)


def test_a_call_that_fails_says_what_to_do(server):
    from alembic.util.exc import CommandError

    client = mlflow_client.open_client(load(None, [f"mlflow.uri={server}"]))
    with pytest.raises(MlflowFault, match=r"MLflow at http://127.* Parameter 'version' must be"):
        client.get_model_version("m", "x")
    with pytest.raises(MlflowFault) as caught:
        client.get_registered_model("nobody")
    assert caught.value.code == "RESOURCE_DOES_NOT_EXIST"
    assert "newer MLflow wrote it" in refused(CommandError("Can't locate revision 'abc'"))


def test_a_version_registered_before_the_identity_covered_the_config(cfg):
    """It has only the hash of the weights, and its folder as source. Weights and the fields in its
    tags are compared. Promoting the same drafter again gives it the identity.
    """
    folder = make_drafter(cfg, "one", 1)
    promotion.evaluate(cfg, folder)
    candidate = read_candidate(cfg)
    old = {OLD_SHA256: file_sha256(folder / WEIGHTS), FIELDS: json.dumps(candidate.compat)}
    client = Registry(cfg).client
    client.create_registered_model("drafter")
    client.create_model_version("drafter", str(folder), tags=old)
    client.set_registered_model_alias("drafter", "champion", "1")
    assert versions.resolve(cfg, "champion") == ("1", folder)
    _, summary = promoted(cfg, "two", 2, against=folder)
    assert (summary["version"], summary["previous"]) == ("2", "1")
    assert rollback.run(cfg)["version"] == "1"
    promotion.evaluate(cfg, folder)
    cfg = cfg.override("promote", drafter=str(folder))
    assert (promote.run(cfg)["decision"], promote.run(cfg)["version"]) == ("unchanged", "1")
    assert client.get_model_version("drafter", "1").tags[SHA256] == drafter_sha256(folder)
    config = folder / "config.json"
    client.delete_model_version_tag("drafter", "1", SHA256)
    config.write_text(config.read_text().replace("1e-05", "0.1"))
    with pytest.raises(ValueError, match="holds another drafter than was registered"):
        versions.resolve(cfg, "champion")


def test_a_version_of_somebody_else_is_named(cfg):
    client = Registry(cfg).client
    client.create_registered_model("drafter")
    for number, tags in enumerate([{}, {SHA256: "a", FIELDS: "{"}, {FIELDS: "{}"}], 1):
        client.create_model_version("drafter", "/nowhere", tags=tags)
        with pytest.raises(ValueError, match=f"version {number} of drafter lacks the tags"):
            versions.resolve(cfg, str(number))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("acme/qwen3-8b-drafter", "MLflow allows no '/' in it"),
        ("a:b", "MLflow allows no ':' in it"),
        ("", "a name is needed"),
        ("  ", "a name is needed"),
        ("..", "a name is needed"),
        ("a\nb", "printable"),
        ("x" * 257, "at most 256"),
    ],
)
def test_names_are_refused_when_the_config_is_loaded(name, reason, capsys):
    """They were once refused only at the last stage, and serve took that for "no champion yet"."""
    assert cli.main(["serve", "serve.drafter=champion", f"mlflow.model={name}"]) == 2
    assert reason in capsys.readouterr().err
    if not set("/:") & set(name):
        with pytest.raises(ValueError, match=r"mlflow\.experiment"):
            load(None, [f"mlflow.experiment={name}"])


@pytest.mark.parametrize("name", ["o'brien", 'say "x"', "both'\"x", "back\\slash", "50%_of` it"])
def test_any_other_name_is_quoted(cfg, name):
    cfg = cfg.override("mlflow", model=name, experiment=name)
    first, summary = promoted(cfg, 'it\'s "one"', 1)
    assert summary["decision"] == "promoted"
    assert promoted(cfg, "copy", 1)[1]["decision"] == "unchanged"
    assert drafter_sha256(opened(cfg, "champion")[1]) == drafter_sha256(first)
    near = cfg.override("mlflow", model=name.replace("'", "_").replace('"', "_"))
    assert near.mlflow.model == name or versions.resolve(near, "champion") is None


@pytest.mark.parametrize("where", ["cfg", "remote"])
def test_labels_of_any_text_are_stored(where, request, tmp_path):
    """Labels come from an HTTP header. They get into metric names, parameters, tags, file names and
    decisions.
    """
    cfg = request.getfixturevalue(where).override("mlflow", experiment="of any ' text \" \\")
    for name in HOSTILE[:4]:
        tracker = Tracker.start(cfg, name, {"traffic": ["k" * 70] * 2000})
        again = Tracker.start(cfg, name, {})
        assert again.run_id == tracker.run_id
    params = {f"p{i}": text for i, text in enumerate(HOSTILE)}
    for _ in range(2):  # a resumed run says the same again
        tracker.describe(params, params, "config")
        tracker.log(1, [{"loss": 1.0}], {f"val_tau/{text}": 2.0 for text in HOSTILE})
    data = tracker.client.get_run(tracker.run_id).data
    assert len({metric_name(f"val_tau/{text}") for text in HOSTILE} & set(data.metrics)) == 10
    assert data.params["p4"] == data.tags["execution.p4"] == "[/b]"
    assert len(data.params["p7"]) == 6000
    tracker.end()
    assert Tracker.unfinished(cfg, HOSTILE[3]) is None
    file = tmp_path / "we#i%rd 'page\".html"
    file.write_text("<p>")
    attach(cfg, "we#i%rd", file, "reports")
    folder = make_drafter(cfg, "we#i%rd [b]", 1)
    path = promotion.evaluate(cfg, folder)
    evaluation = json.loads(path.read_text())
    evaluation["tau"]["domains"] = dict.fromkeys(HOSTILE, 2.0)
    path.write_text(json.dumps(evaluation))
    assert promote.run(cfg)["decision"] == "promoted"
    assert drafter_sha256(opened(cfg, "champion")[1]) == drafter_sha256(folder)
    tags = Registry(cfg).client.get_model_version(cfg.mlflow.model, "1").tags
    assert json.loads(tags["eval.tau.domains"]) == {"domains": 10, "lowest": 2.0, "highest": 2.0}


def test_two_first_commands_of_a_work_folder_at_once(tmp_path):
    """Both once created the tables of MLflow: `table experiments already exists`."""
    code = (
        "import sys; from jobs.base.config import load\n"
        "from jobs.registry.versions import Registry\n"
        "print(Registry(load(None, sys.argv[1:])).current('champion'))"
    )
    command = [sys.executable, "-c", code, f"work={tmp_path / 'new'}"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    found = [process.communicate(timeout=200) for process in both]
    assert [out for out, _ in found] == [b"None\n", b"None\n"], found


def test_a_user_id_without_a_name_is_named_by_its_number(monkeypatch):
    """As in `docker run --user 12345`."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert who().startswith(f"uid{os.getuid()}@")


def test_databases_that_cannot_be_used_are_named(cfg, capsys):
    promoted(cfg, "one", 1)
    path = cfg.path("mlflow.db")
    good = path.read_bytes()
    work = f"work={cfg.work}"
    path.write_bytes(good[:4096] + b"\xff" * (len(good) - 4096))
    assert cli.main(["rollback", work]) == 2
    assert "restore it from a backup" in capsys.readouterr().err
    path.write_bytes(b"not one at all")
    assert cli.main(["rollback", work]) == 2
    assert "is not an SQLite database: restore it" in capsys.readouterr().err
    path.unlink()
    path.mkdir()
    assert cli.main(["rollback", work]) == 2
    assert "not a database. What to do: restore it" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to what is read-only")
def test_a_registry_that_may_only_be_read(cfg):
    promoted(cfg, "one", 1)
    try:
        cfg.path("mlflow.db").chmod(0o444)
        cfg.path().chmod(0o555)
        assert opened(cfg, "champion")[0] == "1"
    finally:
        cfg.path().chmod(0o755)


@pytest.mark.slow
def test_evaluate_and_promote_through_a_server(rivals, tmp_path, server, capsys):
    """The case as it was reported: from the command line, on traffic of a tiny target."""
    work = shutil.copytree(rivals, tmp_path / "work")
    words = [f"work={work}", *RIVAL_SETTINGS, f"mlflow.uri={server}", "mlflow.model=tiny"]
    assert cli.main(["evaluate", *words]) == 0
    gate = work / "gate.yaml"
    gate.write_text("tau: {min: 1}\ngain: {min: -5}\nspeed: {required: false}\n")
    assert cli.main(["promote", *words, f"promote.gate={gate}"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["decision"] == "promoted"
    cfg = load(None, words)
    assert drafters.find_drafter(cfg, "").name == opened(cfg, "champion")[1].name
