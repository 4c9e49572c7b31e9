"""Free memory within a container's limit, and how much of it a server takes."""

import pytest

from serving import server_memory
from serving.server_memory import GIB, free_bytes, gpu_share, server_bytes, weight_bytes
from tests.helpers.tiny import make_target


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 100 GiB free."""
    found = type("Memory", (), {"available": 100 * GIB})
    monkeypatch.setattr(server_memory.psutil, "virtual_memory", lambda: found)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_a_container_of_version_2_counts_with_its_limit(tmp_path):
    me = tmp_path / "cgroup"
    me.write_text("0::/pod/one\n")
    write(tmp_path / "pod", memory__max="max", memory__current=1)
    stat = f"anon 5\ninactive_file {2 * GIB}"
    write(tmp_path / "pod" / "one", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=stat)
    assert free_bytes(tmp_path, me) == 5 * GIB
    write(tmp_path / "pod", memory__max=4 * GIB, memory__current=3 * GIB)
    assert free_bytes(tmp_path, me) == GIB, "the tightest group around us decides"


def test_a_container_that_sees_its_own_group_as_root(tmp_path):
    """cgroup version 1 in a container: the path is the host's, but the group is mounted as root."""
    me = tmp_path / "cgroup"
    me.write_text("9:name=systemd:/\n4:memory:/docker/abc\n0::/\n")
    limits = {"memory__limit_in_bytes": 6 * GIB, "memory__usage_in_bytes": 2 * GIB}
    write(tmp_path / "memory", **limits)
    assert free_bytes(tmp_path, me) == 4 * GIB


def test_without_a_limit_the_machine_decides(tmp_path):
    assert free_bytes(tmp_path, tmp_path / "absent") == 100 * GIB
    me = tmp_path / "cgroup"
    me.write_text("4:memory:/x\n0::/x\n")
    write(tmp_path / "memory" / "x", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=1)
    assert free_bytes(tmp_path, me) == 100 * GIB


def test_weights_are_counted_from_headers_in_the_dtype_that_is_served(tmp_path):
    target = make_target(tmp_path / "target")
    stored = weight_bytes(target, 4)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    assert stored == pytest.approx(size, rel=0.1)
    assert weight_bytes(target, 2) == stored // 2
    assert server_bytes([target], 2, 2) > 3 * GIB
    assert server_bytes([target, target], 2, 2) - server_bytes([target], 2, 2) == stored


def test_the_share_of_a_gpu_is_what_the_arguments_say():
    assert gpu_share([]) == 0.92
    assert gpu_share(["--x", "--gpu-memory-utilization", "0.4"]) == 0.4
    assert gpu_share(["--gpu-memory-utilization=0.3"]) == 0.3


@pytest.mark.parametrize(
    "data", [b"", b"\x05\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 20, b"x" * 7]
)
def test_a_damaged_safetensors_file_is_named(tmp_path, data):
    (tmp_path / "model-00001.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model-00001\.safetensors: damaged"):
        weight_bytes(tmp_path, 2)
