"""One command, many clocks: every file of infra/schedules calls it rightly."""

import py_compile
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from tests.helpers.commands import checked, commands
from tests.helpers.promql import INFRA

SCHEDULES = INFRA / "schedules"
SETTINGS = INFRA / "flywheel.yaml"  # in place of my.yaml


@pytest.mark.parametrize("file", sorted(SCHEDULES.iterdir()), ids=lambda file: file.name)
def test_it_calls_the_command_as_it_is(file: Path):
    found = commands(file.read_text())
    assert ["retrain", "--config", "my.yaml"] in found
    for words in found:
        checked(words, SETTINGS if "--config" in words else None)


@pytest.mark.parametrize("file", ["airflow_dag.py", "dagster_job.py"])
def test_python_compiles(file, tmp_path):
    py_compile.compile(str(SCHEDULES / file), cfile=str(tmp_path / "compiled"), doraise=True)


def test_the_workflow_fits_the_schema_of_github_actions():
    schema = get_builtin_schema("vendor.github-workflows")
    flow = yaml.safe_load((SCHEDULES / "github-actions.yaml").read_text())
    flow["on"] = flow.pop(True)  # what the word means in YAML 1.1
    jsonschema.Draft7Validator(schema).validate(flow)
    del flow["jobs"]["retrain"]["runs-on"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate(flow)


def test_lines_of_the_crontab_have_five_fields():
    lines = [line.lstrip("# ") for line in (SCHEDULES / "crontab").read_text().splitlines()]
    timed = [line for line in lines if "cd $FLYWHEEL" in line]
    assert len(timed) == 3
    for line in timed:
        fields = line.partition("cd ")[0].split()
        assert len(fields) == 5, line
        assert all(set(field) <= set("0123456789*/,-") for field in fields), line
        assert "%" not in line, "cron would end the command there"
