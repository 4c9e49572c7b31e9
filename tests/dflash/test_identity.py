"""A target's identity covers every byte that an engine reads, and is cached."""

import os
import shutil
import time

import pytest
from safetensors.torch import load_file, save_file

from dflash import identity
from dflash.checkpoint import WEIGHTS, drafter_sha256, engine_files
from dflash.identity import legacy_target_id, target_id
from tests.helpers.tiny import add_tokenizer, make_target


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return add_tokenizer(make_target(tmp_path_factory.mktemp("identity") / "target"), 97, "{{ 1 }}")


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def test_a_fine_tune_of_any_single_tensor_has_another_identity(original, folder):
    """The identity once hashed three parts of each weight file and missed most of a large model."""
    tensors = load_file(original / "model.safetensors")
    seen = {target_id(original)}
    for name in tensors:
        changed = {k: t.clone() for k, t in tensors.items()}
        changed[name].flatten()[-1] += 1e-3
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        seen.add(target_id(folder))
    assert len(seen) == 1 + len(tensors)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tools.jinja",
        "model.safetensors.index.json",
        "hf_quant_config.json",
        "special_tokens_map.json",
        "tokenizer.model",
        "merges.txt",
    ],
)
def test_every_file_that_an_engine_reads_is_in_the_identity(folder, name):
    before = target_id(folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((path.read_bytes() if path.is_file() else b"{}") + b"\n")
    assert target_id(folder) != before


def test_prose_and_unfinished_downloads_are_not(folder):
    before = target_id(folder)
    for name in ("README.md", "LICENSE", ".part.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(b"x")
    assert target_id(folder) == before


def test_the_same_model_elsewhere_has_the_same_identity(original, folder):
    assert target_id(folder) == target_id(original)
    links = folder.parent / "links"  # as a hub's cache lays a snapshot out
    links.mkdir()
    for path in original.iterdir():
        (links / path.name).symlink_to(path)
    assert target_id(links) == target_id(original)


@pytest.fixture
def big(folder, tmp_path, monkeypatch):
    """A target whose weights count as large and old, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "LARGE", 1)
    monkeypatch.setattr(identity, "SETTLED_NS", 0)
    monkeypatch.setattr(identity, "_KNOWN", {})
    return folder


def reads(monkeypatch):
    """Records which files are hashed from here on."""
    found, read = [], identity._read
    monkeypatch.setattr(identity, "_read", lambda p, bar: found.append(p.name) or read(p, bar))
    return found


def test_another_process_does_not_read_the_weights_again(big, monkeypatch):
    before = target_id(big)
    monkeypatch.setattr(identity, "_KNOWN", {})
    read = reads(monkeypatch)
    assert (target_id(big), read) == (before, [])


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"{}", b'["a", 1, 2, 3, 4, "00"]', b"7"])
def test_a_damaged_cache_is_read_over(big, tmp_path, monkeypatch, content):
    before = target_id(big)
    for path in (tmp_path / "cache/dflash-flywheel/digests").iterdir():
        path.write_bytes(content)
    monkeypatch.setattr(identity, "_KNOWN", {})
    assert target_id(big) == before


def test_a_cache_that_cannot_be_written_is_no_error(big, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert target_id(big) == target_id(big)
    assert (tmp_path / "cache").is_file()


def test_weights_replaced_in_place_with_equal_size_and_time_are_noticed(big):
    """`cp -p` and rsync leave such files: only ctime and inode show the change."""
    path = big / "model.safetensors"
    before, times = target_id(big), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    time.sleep(0.02)  # more than a tick of the file system's clock
    path.write_bytes(data)
    os.utime(path, ns=times)
    assert path.stat().st_mtime_ns == times[1]
    assert target_id(big) != before


def test_a_write_within_one_tick_of_the_clock_is_noticed(folder):
    path, seen = folder / "model.safetensors", set()
    data = bytearray(path.read_bytes())
    for i in range(20):
        data[-1] = i
        path.write_bytes(data)
        seen.add(target_id(folder))
    assert len(seen) == 20


def test_a_target_that_is_still_being_copied_is_named(folder, monkeypatch):
    path = folder / "model.safetensors"
    stamps = iter(range(10))
    monkeypatch.setattr(identity, "_stamp", lambda p: (str(p), next(stamps), 0, 0, 0))
    with pytest.raises(ValueError, match=r"model\.safetensors changed while it was read: wait"):
        identity.file_digests([path])


def test_asking_again_reads_no_file(folder, monkeypatch):
    for path in identity.model_files(folder):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(identity, "SETTLED_NS", 0)  # ctime is now
    before, read = target_id(folder), reads(monkeypatch)
    assert (target_id(folder), read) == (before, [])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf"])
def test_weights_in_another_format_only_are_named(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=f"holds weights as {name} only: save the model as safete"):
        target_id(folder)


def test_the_former_identity_is_still_known(tmp_path):
    """The id that releases before December 2026 gave to a fixed folder."""
    (tmp_path / "config.json").write_text("{}")
    header = b'{"__metadata__":{"format":"pt"}}'
    content = len(header).to_bytes(8, "little") + header + b"weights"
    (tmp_path / "model.safetensors").write_bytes(content)
    assert legacy_target_id(tmp_path) == "b2e0922f34e6abca"
    assert target_id(tmp_path) != legacy_target_id(tmp_path)


def test_a_folder_in_a_drafters_folder_is_no_file_of_its_identity(tmp_path):
    """It was opened as a file because of its name."""
    for name in (WEIGHTS, "config.json"):
        (tmp_path / name).write_bytes(b"{}")
    before = drafter_sha256(tmp_path)
    (tmp_path / "old.json").mkdir()
    assert drafter_sha256(tmp_path) == before
    assert [path.name for path in engine_files(tmp_path)] == ["config.json", WEIGHTS]
