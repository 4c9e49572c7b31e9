"""Drafters are found and opened wherever they are kept."""

import time
from pathlib import Path

import pytest

from jobs.base.config import load
from jobs.base.drafter_folders import local_folder, newest_drafter, with_local_base
from store.place import Place


@pytest.fixture
def cfg(work_url, tmp_path):
    return load(None, [f"work={work_url}", f"scratch={tmp_path / 'scratch'}"])


def put(place: Place, text: str = "{}") -> None:
    place.write("model.safetensors", text.encode())
    place.write("config.json", text.encode())


def test_the_newest_complete_folder_is_taken(cfg):
    assert newest_drafter(cfg) is None
    put(cfg.place("drafters", "one"))
    time.sleep(1.1)  # S3 knows seconds
    put(cfg.place("drafters", "two"), "2")
    time.sleep(1.1)
    cfg.place("drafters", "half").write("model.safetensors", b"")
    put(cfg.place("drafters", ".three.partial"))
    put(cfg.place("drafters", "one", "deeper"))
    found = newest_drafter(cfg)
    assert found is not None
    assert (found.name, (found / "config.json").read_text()) == ("two", "2")
    assert {path.name for path in found.iterdir()} == {"config.json", "model.safetensors"}


def test_a_folder_in_a_bucket_is_copied_once_and_anew_when_it_changes(cfg):
    place = cfg.place("drafters", "one")
    put(place)
    first = local_folder(cfg, str(place))
    if place.is_local:
        assert first == place.path
        return
    (first / "mine").write_text("kept while nothing changes there")
    assert (local_folder(cfg, str(place)) / "mine").is_file()
    put(place, "anew")
    again = local_folder(cfg, f"{place}/")
    assert (again.name, (again / "config.json").read_text()) == ("one", "anew")
    assert not (again / "mine").exists()
    assert (first / "config.json").read_text() == "{}", "somebody may be reading it"
    assert again.is_relative_to(cfg.path())


def test_a_place_without_a_folder_is_named(cfg, bucket):
    with pytest.raises(FileNotFoundError, match="drafters/none"):
        local_folder(cfg, f"{bucket}/drafters/none")


def test_a_base_in_a_bucket_is_on_the_local_disk_for_training(cfg, bucket):
    put(Place(bucket, "base"))
    changed = with_local_base(cfg.override("train", base=f"{bucket}/base"))
    assert (Path(changed.train.base) / "config.json").is_file()
    assert with_local_base(cfg) is cfg
