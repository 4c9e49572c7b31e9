"""What the whole run shares: a small Ray cluster, a tiny harvested work folder, an S3 server."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

# Two threads on matrices this small only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """made_once(name, make): the folder `name` as make(folder) fills it, once for all processes of
    this run of pytest.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, whole = root / f"{name}-once", root / f".{name}-once.whole"
        with FileLock(root / f".{name}-once.lock"):
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                whole.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def ray_cluster(s3):
    """A local Ray of 2 logical CPUs, started once. Jobs find it and leave it running. Its workers
    have the environment of its start, so that also leads to the S3 server.
    """
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.env.items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def harvested(made_once, ray_cluster):
    """A work folder up to its features; do not write to it, take `work`."""
    from tests.helpers.work import make_work

    return made_once("harvested", make_work)


@pytest.fixture(scope="session")
def rivals(made_once, ray_cluster):
    """Traffic and two drafters to compare on it; do not write to it, copy it."""
    from tests.helpers.work import make_rivals

    return made_once("rivals", make_rivals)


@pytest.fixture(scope="module")
def work(tmp_path_factory, harvested):
    """A copy of `harvested` for one test module."""
    return shutil.copytree(harvested, tmp_path_factory.mktemp("work") / "work")


@pytest.fixture
def one_process():
    """See `in_one_process`."""
    from tests.helpers.work import in_one_process

    with in_one_process():
        yield


@pytest.fixture(scope="session")
def empty_database(made_once):
    """MLflow needs ten seconds to make its tables: once."""
    from jobs.base.config import load
    from jobs.registry.versions import Registry

    def make(folder: Path) -> None:
        assert Registry(load(None, [f"work={folder}"])).current("champion") is None

    return made_once("mlflow", make) / "mlflow.db"


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """An S3 server of this process, see `S3`. Take `s3_env` to reach it by the environment."""
    from tests.helpers.s3 import running

    with running(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_env(s3, monkeypatch):
    """`s3`, with this process's environment leading to it and nothing else of AWS in it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def bucket(s3_env):
    """The URL of an empty place in a bucket that this process can reach."""
    return s3_env.url()


@pytest.fixture(params=["local", "bucket"])
def work_url(request, tmp_path):
    """An empty work folder, on a local disk and in a bucket."""
    return str(tmp_path / "work") if request.param == "local" else request.getfixturevalue("bucket")
