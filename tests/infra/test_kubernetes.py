"""Manifests: against the schemas of Kubernetes and KubeRay, and what they name of one another."""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jobs.base.config import load
from tests.helpers.commands import checked, commands
from tests.helpers.promql import INFRA

FOLDER = INFRA / "kubernetes"
OVERLAYS = ("base", "cpu-demo", "gpu")
VERSION = "1.30"  # of Kubernetes: the oldest that they have to fit
KUBERAY = yaml.safe_load((Path(__file__).parent / "data/kuberay.yaml").read_text())
SECRETS = {"flywheel-s3", "flywheel-token", "flywheel-ray"}
"""Secrets that users make, and the one that KubeRay makes of authOptions."""
SETTINGS = FOLDER / "base/flywheel.yaml"
Manifest = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Manifest]:
    """What `kubectl apply -k` would send. Do not change it."""
    for tool in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(tool[0]):
            command = [*tool, str(FOLDER / overlay)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            return list(yaml.safe_load_all(text))
    pytest.skip("neither kubectl nor kustomize is installed")


def as_written() -> list[Manifest]:
    """Every file before kustomize: checked wherever these tests run."""
    files = [
        f for f in FOLDER.rglob("*.yaml") if f.name not in ("kustomization.yaml", SETTINGS.name)
    ]
    return [one for file in sorted(files) for one in yaml.safe_load_all(file.read_text())]


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request) -> list[Manifest]:
    return rendered(request.param)


def pod_templates(one: Any) -> Iterator[Manifest]:
    """Every pod template below a manifest."""
    if isinstance(one, dict):
        if "containers" in one.get("spec", {}):
            yield one
        for value in one.values():
            yield from pod_templates(value)
    if isinstance(one, list):
        for value in one:
            yield from pod_templates(value)


def check(one: Manifest) -> None:
    """Raise if the schemas do not know a field or refuse a value."""
    _check(json.dumps(one, sort_keys=True))


@cache
def _check(text: str) -> None:
    one = json.loads(text)
    if one["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(one, VERSION, strict=True)
        return
    jsonschema.validate(one, KUBERAY)
    for template in pod_templates(one["spec"]):
        as_kind = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        kubernetes_validate.validate(as_kind | {"template": template}, VERSION, strict=True)


def test_files_fit_their_schemas():
    found = as_written()
    assert {"RayCluster", "RayJob", "CronJob", "Deployment", "Service", "NetworkPolicy"} <= {
        one["kind"] for one in found
    }
    for one in found:
        check(one)


def test_overlays_fit_their_schemas(manifests):
    assert len(manifests) >= 15
    for one in manifests:
        check(one)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec.template.spec.containers.0.resource", {}),
        ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.envfrom", []),
        ("RayCluster", "spec.workerGroupSpec", []),
        ("RayCluster", "spec.workerGroupSpecs.0.rayStartParams.num-cpus", 0),
        ("CronJob", "spec.concurencyPolicy", "Forbid"),
    ],
)
def test_a_mistake_is_found(kind, path, value):
    wrong = copy.deepcopy(next(one for one in as_written() if one["kind"] == kind))
    *parents, last = path.split(".")
    at: Any = wrong
    for name in parents:
        at = at[int(name)] if name.isdigit() else at[name]
    at[last] = value
    errors = (jsonschema.ValidationError, kubernetes_validate.ValidationError)
    with pytest.raises(errors):
        check(wrong)


def named(manifests: list[Manifest], kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in manifests if one["kind"] == kind}


def containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    for template in pod_templates(manifests):
        yield from template["spec"]["containers"]


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    wanted = dict(selector.get("matchLabels", {}))
    for one in selector.get("matchExpressions", []):
        if labels.get(one["key"]) not in one["values"]:
            return False
    return all(labels.get(name) == value for name, value in wanted.items())


def test_what_pods_mount_and_read_exists(manifests):
    claims, maps = named(manifests, "PersistentVolumeClaim"), named(manifests, "ConfigMap")
    for template in pod_templates(manifests):
        spec = template["spec"]
        for volume in spec.get("volumes", []):
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {*claims, None}
            assert volume.get("configMap", {}).get("name") in {*maps, None}
            assert volume.get("secret", {}).get("secretName") in {*SECRETS, None}
        for container in spec["containers"]:
            mounted = {one["name"] for one in container.get("volumeMounts", [])}
            assert mounted <= {volume["name"] for volume in spec.get("volumes", [])}
            for one in container.get("envFrom", []):
                assert one["secretRef"]["name"] in SECRETS
            for one in container.get("env", []):
                secret = one.get("valueFrom", {}).get("secretKeyRef")
                assert secret is None or secret["name"] in SECRETS
                assert secret or not re.search("KEY|TOKEN|PASSWORD|SECRET", one["name"])
    assert named(manifests, "Secret") == set(), "secrets are named, never written down"


def test_pods_have_no_rights_that_they_do_not_need(manifests):
    for template in pod_templates(manifests):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 1000, "the user of the images"
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


def test_selectors_find_pods(manifests):
    pods = [template["metadata"]["labels"] for template in pod_templates(manifests)]
    for one in manifests:
        spec = one.get("spec", {})
        if one["kind"] == "Service":
            assert any(matches({"matchLabels": spec["selector"]}, labels) for labels in pods)
        if one["kind"] in ("PodDisruptionBudget", "Deployment"):
            assert any(matches(spec["selector"], labels) for labels in pods)
        if one["kind"] == "NetworkPolicy":
            assert any(matches(spec["podSelector"], labels) for labels in pods)
            own = [
                f["podSelector"]
                for rule in spec.get("ingress", [])
                for f in rule["from"]
                if "podSelector" in f and "namespaceSelector" not in f
            ]
            assert all(any(matches(one, labels) for labels in pods) for one in own)
    denied = next(one for one in manifests if one["metadata"]["name"] == "nothing-else")
    assert denied["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}


def test_windows_do_not_overlap(manifests):
    cron = next(one for one in manifests if one["kind"] == "CronJob")
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    assert len(cron["spec"]["schedule"].split()) == 5


def test_commands_are_those_of_the_product(manifests):
    called = set()
    for container in containers(manifests):
        line = " ".join([*container.get("command", []), *container.get("args", [])])
        for words in commands(line):
            called.add(words[0])
            cfg = checked(words, SETTINGS if "--config" in line else None)
            if words[0] == "rollout":
                host, _, port = cfg.rollout.dns.partition(":")
                service = next(o for o in manifests if o["metadata"]["name"] == host)
                assert service["spec"]["clusterIP"] == "None", "one address for each replica"
                assert service["spec"]["ports"][0]["port"] == int(port) == cfg.serve.port
    assert {"serve", "rollout", "watch", "retrain"} <= called


def test_jobs_are_submitted_as_ray_takes_them(manifests):
    from ray.dashboard.modules.job.cli import submit

    head = f"http://{next(iter(named(manifests, 'RayCluster')))}-head-svc:8265"
    lines = [" ".join([*c.get("command", []), *c.get("args", [])]) for c in containers(manifests)]
    found = [
        line.split("ray job submit")[1].replace("\\\n", " ").split("\n")[0]
        for line in lines
        if "ray job submit" in line
    ]
    assert len(found) == 2
    for line in found:
        context = submit.make_context("submit", line.split())
        assert context.params["address"] == head
        assert context.params["entrypoint"][:2] == ("flywheel", "retrain")


def test_replicas_let_only_the_roll_out_in(manifests):
    cfg = load(SETTINGS)
    replica = next(c for c in containers(manifests) if c["name"] == "vllm")
    assert cfg.serve.host == "0.0.0.0"
    assert cfg.serve.port == replica["ports"][0]["containerPort"]
    assert cfg.serve.token_file == cfg.rollout.token_file
    for name in ("vllm", "rollout"):
        one = next(c for c in containers(manifests) if c["name"] == name)
        mounts = {m["mountPath"] for m in one["volumeMounts"]}
        assert str(Path(cfg.serve.token_file).parent) in mounts
        assert {cfg.scratch, str(cfg.target_path.parent)} <= mounts


def test_a_window_can_be_started_by_hand():
    job = yaml.safe_load((FOLDER / "retrain-now.yaml").read_text())
    [words] = commands(job["spec"]["entrypoint"])
    checked(words, SETTINGS)
    cluster = next(one for one in as_written() if one["kind"] == "RayCluster")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}


def test_gpus_are_where_they_are_used():
    found = {c["name"]: c for c in containers(rendered("gpu"))}
    assert found["vllm"]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert all(c["image"].endswith(":cuda") for c in found.values())
    assert "--entrypoint-num-gpus=1" in found["submit"]["args"]
