"""The rules of this repository: who may import whom, how long things may be, how they are named."""

import itertools
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipelines", "jobs", "serving", "store", "dflash")
LINTER = Path(sys.executable).parent / "lint-imports"


@pytest.fixture
def house(tmp_path):
    """A copy of the packages; call it to plant a line in a file and get the linter's verdict."""
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def plant(file: str, line: str) -> tuple[int, str]:
        with open(tmp_path / file, "a") as stream:
            stream.write(f"\n{line}\n")
        command = [LINTER, "--no-cache"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    return plant


def test_the_house_as_it_is_keeps_its_contracts(house):
    code, told = house("jobs/train.py", "")
    assert code == 0, told


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("jobs/train.py", "from jobs.harvest import run", "Stages are independent"),
        ("jobs/training/loop.py", "import jobs.train", "Stages are independent"),
        ("jobs/base/console.py", "import jobs.dataset.slices", "Stages are independent"),
        ("jobs/proof/speed.py", "import jobs.reporting.page_tables", "Stages are independent"),
        ("jobs/evaluate.py", "import pipelines.demo", "Packages import downwards"),
        ("store/files.py", "from jobs.base.config import Config", "Packages import downwards"),
        ("dflash/losses.py", "import ray", "The method knows no"),
        ("dflash/losses.py", "import obstore", "The method knows no"),
        ("store/ids.py", "import torch", "The data layer knows no"),
    ],
)
def test_a_planted_import_breaks_its_contract(house, file, line, contract):
    code, told = house(file, line)
    assert code == 1
    assert re.search(rf"{contract}.* BROKEN", told), told


def test_a_new_stage_or_room_must_be_listed(house):
    code, told = house("jobs/new_stage.py", '"""A stage that no contract knows."""')
    assert code == 1
    assert "new_stage" in told


def test_importing_the_data_layer_needs_neither_torch_nor_ray():
    names = [f"store.{path.stem}" for path in (ROOT / "store").glob("[!_]*.py")]
    code = f"import sys, {', '.join(names)}; print({{'torch', 'ray', 'duckdb'}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_no_two_modules_share_a_name_or_differ_by_a_letter():
    """Several modules named `train` were hard to tell apart in imports."""
    places = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("[!_]*.py"):
            places[path.stem].append(path.relative_to(ROOT))
    assert [found for found in places.values() if len(found) > 1] == []
    pairs = itertools.combinations(sorted(places), 2)
    assert [(a, b) for a, b in pairs if b.startswith(a) and len(b) == len(a) + 1] == []


def test_every_room_says_what_it_holds_and_who_may_import_it():
    rooms = [path for path in (ROOT / "jobs").iterdir() if any(path.glob("*.py"))]
    assert len(rooms) > 10
    for room in rooms:
        text = (room / "__init__.py").read_text()
        assert "import" in text, f"{room}: its docstring does not say who may import it"
        assert text.count(". ") + text.count(".\n") >= 2, room


def test_what_is_too_long_is_named(tmp_path):
    script = ROOT / ".ci" / "sizes.py"
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "stage.py").write_text("x = 1\n" * 151)
    (tmp_path / "long.py").write_text("x = 1\n" * 400 + "def f():\n" + "    x = 1\n" * 60)
    (tmp_path / "fits.py").write_text("def f():\n" + "    x = 1\n" * 59)
    subprocess.run([*git, "add", "."], check=True)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "jobs/stage.py: 151 lines, at most 150",
        "long.py: 461 lines, at most 400",
        "long.py:401: f, 61 lines, at most 60",
    ]


def test_every_fault_of_when_things_break_has_a_test():
    text = (ROOT / "docs" / "how-to" / "when-things-break.md").read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) >= 11
    for section in sections:
        parts = ("**You see**", "**The system**", "**Do**")
        assert all(part in section for part in parts), section.splitlines()[0]
        _, _, named = section.partition("\nTests: ")
        found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
        assert len(found) == named.count("::") >= 1, section.splitlines()[0]
        for file, test in found:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"
