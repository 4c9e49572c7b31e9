"""What tests of ingest share: a target folder with just enough in it to ingest logs. Those of
harvest: two models, and no Ray. Those of roll-outs: a registry and fake replicas.
"""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from jobs.base.config import Config, load


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 1000}')
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["folder", "bucket"])
def anywhere(request, configure, tmp_path):
    """As `configure`, with work in a local folder and in a bucket. The logs are local."""
    work = f"{tmp_path / 'work'}"
    if request.param == "bucket":
        work = request.getfixturevalue("s3_env").url()
    scratch = f"scratch={tmp_path / 'work'}"
    return lambda *overrides: configure(f"work={work}", scratch, *overrides)


@pytest.fixture
def configure(tmp_path, target):
    def make(*overrides) -> Config:
        return load(None, [f"work={tmp_path / 'work'}", f"target.path={target}", *overrides])

    return make


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder of the target, folder of another model of the same vocabulary)."""
    from tests.helpers.tiny import make_target

    folder = tmp_path_factory.mktemp("models")
    return make_target(folder / "own"), make_target(folder / "other", "qwen3")


@pytest.fixture
def in_process(monkeypatch):
    """Run without Ray: an actor takes seconds to start. `harvested` (tests/conftest.py) has it."""
    from jobs.harvesting import actors
    from tests.helpers.harvesting import here

    monkeypatch.setattr(actors, "by_actors", here)


@pytest.fixture(scope="session")
def fleet_base(made_once, empty_database):
    """See `make_base`; do not write to it."""
    from tests.helpers.rollouts import make_base

    return made_once("registry", lambda folder: make_base(folder, empty_database)) / "base"


@pytest.fixture
def start_fleet(tmp_path, fleet_base):
    """A function to make a `world` in a `with`, from the chances of each version."""
    from tests.helpers.rollouts import world

    @contextmanager
    def start(*chances, **more):
        with world(tmp_path, fleet_base, chances, **more) as one:
            yield one

    return start
