"""The Kubernetes files: valid by the API's own schemas, and true to what the program needs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.app import ROUTES
from service.queue.redis_queue import GROUP
from service.queue.redis_store import NAMESPACE
from service.settings import Settings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.33"
# Kinds that operators bring along: their schemas aren't Kubernetes' own, so what we rely on is checked here.
CUSTOM = {"ScaledObject", "TriggerAuthentication", "PodMonitor", "Kustomization"}
Json = dict[str, Any]


def documents() -> Iterator[tuple[str, Json]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield path.name, document


ALL = list(documents())


def one(kind: str, name: str) -> Json:
    (found,) = [item for _, item in ALL if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def pod(kind: str, name: str) -> Json:
    spec: Json = one(kind, name)["spec"]["template"]["spec"]
    return spec


PODS = [("Deployment", "foreword-api"), ("StatefulSet", "foreword-worker"), ("StatefulSet", "redis")]


@pytest.mark.parametrize(
    "document",
    [item for _, item in ALL if item["kind"] not in CUSTOM],
    ids=lambda item: f"{item['kind']}-{item['metadata']['name']}",
)
def test_valid_by_the_schema(document: Json) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_schema_would_say_no() -> None:
    broken = yaml.safe_load(yaml.safe_dump(one("Deployment", "foreword-api")))
    broken["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def test_kustomization_names_every_file() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(kustomization["resources"]) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    images = {pod(*name)["containers"][0]["image"] for name in PODS[:2]}
    assert {image["name"] for image in kustomization["images"]} == images


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_pods_may_do_nothing_they_need_not(kind: str, name: str) -> None:
    spec = pod(kind, name)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"readinessProbe", "livenessProbe"} <= container.keys()
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_every_volume_claim_and_config_is_there(kind: str, name: str) -> None:
    spec, claims = pod(kind, name), one(kind, name)["spec"].get("volumeClaimTemplates", [])
    volumes = {volume["name"] for volume in spec.get("volumes", [])} | {claim["metadata"]["name"] for claim in claims}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        for source in container.get("envFrom", []):
            one("ConfigMap", source["configMapRef"]["name"])
    for volume in spec.get("volumes", []):
        if claim := volume.get("persistentVolumeClaim"):
            one("PersistentVolumeClaim", claim["claimName"])


@pytest.mark.parametrize(("kind", "name"), PODS[:2])
def test_settings_exist_and_writable_places_are_mounted(kind: str, name: str) -> None:
    (container,) = pod(kind, name)["containers"]
    config = one("ConfigMap", "foreword")["data"]
    named = {variable["name"] for variable in container["env"]} | config.keys()
    assert named <= {f"FOREWORD_{field.upper()}" for field in Settings.model_fields}
    assert {"FOREWORD_REDIS_URL", "FOREWORD_SHARED_DIR", "FOREWORD_API_KEYS_FILE"} <= named
    Settings(**{key.removeprefix("FOREWORD_").lower(): value for key, value in config.items()})
    assert {config["FOREWORD_SHARED_DIR"], "/data", "/tmp"} <= {
        mount["mountPath"] for mount in container["volumeMounts"]
    }


def test_probes_ask_for_routes_that_are_there() -> None:
    paths = {route.path for module in ROUTES for route in module.router.routes}
    for name in PODS[:2]:
        (container,) = pod(*name)["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in paths
            assert container[probe]["httpGet"]["port"] in ports


def test_shutdown_is_given_its_time() -> None:
    api, worker = pod(*PODS[0]), pod(*PODS[1])
    assert api["terminationGracePeriodSeconds"] > 5 + 5, "preStop, then open streams"
    assert worker["terminationGracePeriodSeconds"] >= 60
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_workers_follow_the_queues_streams() -> None:
    scaled = one("ScaledObject", "foreword-worker")
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    target = scaled["spec"]["scaleTargetRef"]
    assert "replicas" not in one(target["kind"], target["name"])["spec"], "or each apply would undo the scaling"
    asked = set()
    for trigger in scaled["spec"]["triggers"]:
        metadata = trigger["metadata"]
        assert (trigger["type"], metadata["consumerGroup"]) == ("redis-streams", GROUP)
        assert all(isinstance(value, str) for value in metadata.values()), "KEDA takes strings"
        one("TriggerAuthentication", trigger["authenticationRef"]["name"])
        (measure,) = {"lagCount", "pendingEntriesCount"} & metadata.keys()
        asked.add((metadata["stream"], measure))
    streams = [f"{NAMESPACE}queue:{kind}" for kind in ("prefill", "answer")]
    assert asked == {(stream, measure) for stream in streams for measure in ("lagCount", "pendingEntriesCount")}


def test_api_scales_and_survives_a_drain() -> None:
    scaler = one("HorizontalPodAutoscaler", "foreword-api")["spec"]
    assert scaler["minReplicas"] > one("PodDisruptionBudget", "foreword-api")["spec"]["minAvailable"]
    target = scaler["scaleTargetRef"]
    assert "replicas" not in one(target["kind"], target["name"])["spec"]
    assert "cpu" in pod(*PODS[0])["containers"][0]["resources"]["requests"], "utilization is of the request"


def test_selectors_meet_their_pods() -> None:
    labels = [one(*name)["spec"]["template"]["metadata"]["labels"] for name in PODS]
    for _, item in ALL:
        if item["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            selector = item["spec"].get("selector", item["spec"].get("podSelector"))
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= label.items() for label in labels), item["metadata"]["name"]


def test_monitor_finds_every_process_under_the_job_that_rules_ask_for() -> None:
    monitor = one("PodMonitor", "foreword")["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    assert set(expression["values"]) == {"foreword-api", "foreword-worker"}
    ports = {port["name"] for name in PODS[:2] for port in pod(*name)["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == ports
    (labels,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["labels"]
    assert labels["pairs"][monitor["jobLabel"]] == "foreword"
    assert labels["includeTemplates"]


def test_network_is_shut_but_for_what_is_named() -> None:
    assert one("NetworkPolicy", "deny-all")["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    rules = one("NetworkPolicy", "foreword-worker")["spec"]["egress"]
    reached = [target for rule in rules for target in rule["to"]]
    assert not [target for target in reached if "ipBlock" in target], "hostile bytes are read there"
    (block,) = [
        target["ipBlock"]
        for rule in one("NetworkPolicy", "foreword-api")["spec"]["egress"]
        for target in rule["to"]
        if "ipBlock" in target
    ]
    assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["except"])
