"""What `--submit` sends, and what it refuses. tests/jobs/test_nodes.py submits a command."""

from pathlib import Path

import pytest

from jobs.base import cli, submission


def test_what_is_sent_is_told_and_gitignore_drops_nothing(tmp_path, monkeypatch, capfd):
    root, sent = tmp_path / "root", tmp_path / "sent"
    texts = {".gitignore": "*.yaml\nlocal.py", "dflash/a.py": "a", "jobs/local.py": "ab"}
    texts |= {"jobs/base/gate.yaml": "abc", "jobs/notes.txt": "", "docs/b.py": ""}
    texts |= {"jobs/__pycache__/a.pyc": ""}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(submission, "ROOT", root)
    submission.copy_code(sent)
    found = sorted(str(p.relative_to(sent)) for p in sent.rglob("*") if p.is_file())
    assert found == ["dflash/a.py", "jobs/base/gate.yaml", "jobs/local.py"]
    said = " ".join(capfd.readouterr().err.split())
    assert "sending 3 files of code, 0.0 MiB (dflash/ 1, jobs/ 2, pipelines/ 0," in said
    assert said.endswith("not sent: jobs/notes.txt")


def test_the_code_of_this_package_is_whole(tmp_path, capfd):
    submission.copy_code(tmp_path)
    for name in ("jobs/base/cli.py", "jobs/promotion/gate.yaml", "jobs/looking/ui.css"):
        assert (tmp_path / name).is_file()
    assert any(Path(tmp_path, "sql").glob("*.sql"))
    assert "not sent" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["work=here"], "is a folder of this machine: with --submit, set work= to a place in a"),
        (["work=s3://b/w", "profile=8b"], "mlflow.uri is empty"),
        (
            ["work=s3://b/w", "profile=8b", "mlflow.uri=http://m"],
            "--submit http://127.0.0.1:9: no Ray dashboard answers",
        ),
    ],
)
def test_what_would_be_lost_with_the_job_is_refused(words, said, capfd):
    assert cli.main(["harvest", "--submit", "http://127.0.0.1:9", *words]) == 2
    assert said in capfd.readouterr().err
