"""compose.yaml without Docker: the schema of the Compose specification, and what it names."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema.validators import validator_for

from tests.helpers.commands import checked, commands
from tests.helpers.promql import INFRA

COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SETTINGS = yaml.safe_load((INFRA / "flywheel.yaml").read_text())


def command_of(service: str) -> str:
    said = SERVICES[service].get("command", "")
    return said if isinstance(said, str) else " ".join(said)


def test_it_fits_the_schema_of_the_specification():
    schema = get_builtin_schema("vendor.compose-spec")
    validator = validator_for(schema)(schema)
    validator.validate(COMPOSE)
    wrong = json.loads(json.dumps(COMPOSE))
    wrong["services"]["fleet"]["healthchek"] = {}
    assert not validator.is_valid(wrong)


def test_what_services_name_exists():
    for name, service in SERVICES.items():
        needed = service.get("depends_on", [])
        assert set(needed) <= set(SERVICES), name
        for dependency, how in needed.items() if isinstance(needed, dict) else ():
            checked_by = SERVICES[dependency].get("healthcheck") or dependency == "fleet"
            assert how["condition"] != "service_healthy" or checked_by, f"{name}: {dependency}"
        assert {c["source"] for c in service.get("configs", [])} <= set(COMPOSE["configs"]), name
        network = service.get("network_mode", "service:machine").removeprefix("service:")
        assert network in SERVICES, name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (INFRA / source).exists(), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"


def test_commands_are_those_of_the_product():
    found = {name: commands(command_of(name)) for name in SERVICES}
    assert {name for name, words in found.items() if words} == {"target", "fleet", "retrain"}
    for words in (one for several in found.values() for one in several):
        assert words[1:] in (
            ["--config", "/etc/flywheel.yaml"],
            ["up", "--config", "/etc/flywheel.yaml"],
        )
        cfg = checked(words, INFRA / "flywheel.yaml")
        # They find one another by files: the fleet's state, its token, captured traffic.
        scratch = "/data"
        assert str(cfg.path()) == scratch
        assert cfg.serve.capture.startswith(scratch)
        assert "scratch:/data" in SERVICES["retrain"]["volumes"]
        assert "scratch:/data" in SERVICES["fleet"]["volumes"]


def test_nothing_is_published_to_other_machines():
    ports = [str(port) for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for name, service in SERVICES.items():
        if str(service["image"]).startswith("flywheel-"):
            assert service["cap_drop"] == ["ALL"], name
            assert service["build"]["target"] in service["image"], name


def test_mlflow_answers_under_the_names_that_clients_use():
    """MLflow refuses every other name in a request, with 403."""
    options = command_of("mlflow")
    allowed = re.search(r"--allowed-hosts (\S+)", options)
    assert allowed
    names = allowed[1].split(",")
    assert SETTINGS["mlflow"]["uri"].removeprefix("http://") in names
    assert "127.0.0.1:5000" in names, "the published port"


def test_the_store_has_the_keys_that_clients_use():
    identities = COMPOSE["configs"]["identities"]["content"]
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert SERVICES["retrain"]["environment"][key] in identities
        assert SERVICES["mlflow"]["environment"][key] in identities
    json.loads(identities)
    assert "credentials" in identities


def test_grafana_finds_prometheus_and_its_board():
    source = yaml.safe_load((INFRA / "grafana/datasource.yaml").read_text())["datasources"][0]
    host = source["url"].removeprefix("http://").partition(":")[0]
    assert SERVICES["prometheus"]["network_mode"] == f"service:{host}"
    boards = yaml.safe_load((INFRA / "grafana/boards.yaml").read_text())["providers"][0]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted
    assert home.startswith(boards["options"]["path"])
    assert "scratch:/data:ro" in SERVICES["prometheus"]["volumes"], "fleet_targets.json is there"


def has_compose() -> bool:
    docker = shutil.which("docker")
    asked = [str(docker), "compose", "version"]
    return (
        docker is not None
        and subprocess.run(asked, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not has_compose(), reason="docker compose is not installed")
def test_compose_itself_reads_it():
    command = ["docker", "compose", "-f", "infra/compose.yaml", "config", "--quiet"]
    subprocess.run(command, cwd=INFRA.parent, check=True)
