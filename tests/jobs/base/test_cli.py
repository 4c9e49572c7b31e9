import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from jobs.base import cli
from jobs.base.config import load


@pytest.fixture
def stage(monkeypatch, tmp_path):
    """Replaces the train stage; returns the list of configs it was run with, and sets its work."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("jobs.train")
    module.seen = []  # pyright: ignore[reportAttributeAccessIssue]

    def install(work):
        def run(cfg):
            module.seen.append(cfg)
            return work()

        module.run = run  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "jobs.train", module)
        return module.seen

    return install


def fail(error):
    def work():
        raise error

    return work


def test_last_line_is_the_summary_and_settings_go_before_or_after_options(stage, tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text("train: {lr: 0.5}")
    seen = stage(lambda: {"steps": 3})
    assert cli.main(["train", "train.steps=3", "--config", str(file), "train.seed=9"]) == 0
    assert (seen[0].train.steps, seen[0].train.lr, seen[0].train.seed) == (3, 0.5, 9)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"steps": 3}


def test_plan_calls_plan_and_only_where_there_is_one(stage, capsys):
    seen = stage(lambda: pytest.fail("the stage ran"))
    sys.modules["jobs.train"].plan = lambda cfg: {"plan": cfg.train.steps}  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["train", "--plan", "train.steps=3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"plan": 3}
    assert cli.main(["ingest", "--plan"]) == 2
    assert "ingest has no --plan; only regenerate, select, train" in capsys.readouterr().err
    assert not seen


def test_a_summary_that_is_not_ok_fails(stage, capsys):
    stage(lambda: {"ok": False, "reason": "gate"})
    assert cli.main(["train"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "reason": "gate"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad thing: do this"), "error: bad thing: do this\n"),
        (FileNotFoundError(2, "No such file or directory", "x.bin"), "error: x.bin: No such"),
        (ModuleNotFoundError("no", name="vllm.config"), "dflash-flywheel[serve]"),
    ],
)
def test_user_errors_are_one_line(stage, capsys, error, message):
    stage(fail(error))
    assert cli.main(["train"]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_error_in_a_ray_task_is_shown_without_its_remote_traceback(stage, capsys):
    class TaskError(ValueError):
        cause = ValueError("bad thing: do this")

    stage(fail(TaskError("ray::task() long\nremote\ntraceback")))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: bad thing: do this\n"


def test_a_ray_worker_that_dies_is_one_line(stage, capsys):
    for error, said in (
        (WorkerCrashedError(), "The worker died unexpectedly while executing this task."),
        (ActorDiedError(), "The actor died unexpectedly before finishing this task."),
        (
            OutOfMemoryError("Task was killed due to the node running low on memory.\nMore"),
            "low on",
        ),
        (of_a_task(WorkerCrashedError()), "The worker died unexpectedly"),
    ):
        stage(fail(error))
        assert cli.main(["train"]) == 2
        message = capsys.readouterr().err
        assert said in message
        assert "run the same command again" in message
        assert message.count("\n") == 1


def of_a_task(error: Exception) -> Exception:
    """As `ray.get` raises what a task has raised."""
    return RayTaskError("task", "remote traceback", error).as_instanceof_cause()


@pytest.mark.parametrize("arguments", [["config"], ["train", "train.step=1"], ["gc", "work=x"]])
def test_what_does_not_need_ray_does_not_import_it(arguments, tmp_path):
    code = (
        f"import sys, jobs.base.cli as cli; cli.main({arguments}); assert 'ray' not in sys.modules"
    )
    here = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=here)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a bug"), ModuleNotFoundError("no", name="jobz"), of_a_task(RuntimeError("bug"))],
)
def test_bugs_keep_their_traceback(stage, error):
    stage(fail(error))
    with pytest.raises(type(error)):
        cli.main(["train"])


def test_debug_shows_the_traceback_of_a_user_error(stage):
    stage(fail(ValueError("bad")))
    with pytest.raises(ValueError, match="bad"):
        cli.main(["train", "--debug"])


def test_interrupt_exits_130_with_one_line(stage, capsys):
    stage(fail(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown stage 'trian': did you mean train?"),
        (["zzz"], "unknown stage 'zzz': one of target, "),
        (["train", "--confg", "x"], "--confg"),
        ([], "stage"),
    ],
)
def test_bad_command_line_exits_2_and_says_what_to_write(capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_setting_exits_2(capsys):
    assert cli.main(["train", "train.step=1"]) == 2
    assert "did you mean train.steps" in capsys.readouterr().err


def test_first_word_of_sql_is_the_question(monkeypatch):
    seen = []
    module = types.ModuleType("jobs.sql")
    module.run = lambda cfg: seen.append(cfg) or {}  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "jobs.sql", module)
    cli.main(["sql", "tau_by_domain", "work=x"])
    assert seen[0].sql.question == "tau_by_domain"


def test_help_imports_no_stage_and_nothing_heavy():
    code = (
        "import sys, jobs.base.cli\n"
        "try: jobs.base.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'vllm', 'mlflow', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"  {stage} " in done.stdout for stage in cli.STAGES)


def test_config_prints_the_schema(capsys):
    assert cli.main(["config", "train.steps=7"]) == 0
    assert "  # optimizer steps; 0 exports the base as it is (integer >= 0)\n  steps: 7\n" in (
        capsys.readouterr().out
    )


def test_a_section_written_twice_is_refused_by_every_command(tmp_path, capsys):
    """The first `train:` was once dropped silently, and the run had other settings."""
    file = tmp_path / "my.yaml"
    file.write_text("train:\n  steps: 4000\ningest: {test_percent: 20}\ntrain:\n  mix: 0.5\n")
    assert cli.main(["config", "--config", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "'train' stands twice, in lines 1 and 4" in output.err


def test_errors_show_what_is_in_names_and_logs_and_do_not_act_on_the_terminal(stage, capsys):
    stage(fail(ValueError("[/b] \x1b[31m \u202e \ud800 no such file\nnext line")))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "error: [/b] \\x1b[31m \\u202e \\ud800 no such file\nnext line\n"
    )


@pytest.mark.parametrize("setting", ["config work=a", "config train.stepz=1 work=\udcff"])
def test_undecodable_arguments_are_no_traceback(setting):
    code = f"from jobs.base.cli import main; raise SystemExit(main({setting.split()!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env={"LC_ALL": "C"}
    )
    assert b"Traceback" not in done.stderr
    assert done.returncode == (2 if "stepz" in setting else 0)


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly():
    code = "import sys; from jobs.base.cli import main; sys.exit(main(['config']))"
    command = f'{sys.executable} -c "{code}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "0\n"


@pytest.mark.parametrize("closed", ["1>&-", "2>&-"])
def test_a_closed_stream_is_no_traceback(closed):
    code = "import sys; from jobs.base.cli import main; sys.exit(main(['sql', 'work=/nowhere']))"
    command = f'{sys.executable} -c "{code}" {closed}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_each_run_is_a_row_of_stages_and_a_plan_is_none(stage, tmp_path):
    cfg = load(None, [f"work={tmp_path / 'work'}"])
    stage(lambda: {"stage": "train", "ok": False, "steps": 3})
    sys.modules["jobs.train"].plan = lambda cfg: {"plan": 1}  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["train", f"work={cfg.work}"]) == 1
    assert cli.main(["train", f"work={cfg.work}", "--plan"]) == 0
    stage(fail(ValueError("bad thing")))
    assert cli.main(["train", f"work={cfg.work}"]) == 2
    rows = cfg.table("stages").read(["stage", "ok", "summary"]).to_pylist()
    assert {row["stage"] for row in rows} == {"train"}
    found = {json.loads(row["summary"]).get("error", ""): row["ok"] for row in rows}
    assert found == {"": False, "bad thing": False}
