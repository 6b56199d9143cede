"""compose.yaml: valid by the Compose specification's schema, and true to what the program needs."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from service.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = json.loads(
    files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text(encoding="utf-8")
)


class Loader(yaml.SafeLoader):
    """Compose's own tags stand for the value behind them."""


Loader.add_constructor("!reset", lambda loader, node: None)


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.load((DEPLOY / name).read_text(encoding="utf-8"), Loader=Loader)
    return data


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_valid_by_the_schema(name: str) -> None:
    jsonschema.validate(load(name), SCHEMA)


def test_the_schema_would_say_no() -> None:
    compose = load("compose.yaml")
    compose["services"]["api"]["restarts"] = "always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(compose, SCHEMA)


@pytest.mark.parametrize("name", ["api", "worker"])
def test_our_services(name: str) -> None:
    service = load("compose.yaml")["services"][name]
    assert service["build"]["target"] == name
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["depends_on"]["redis"]["condition"] == "service_healthy"
    settings = {f"FOREWORD_{field.upper()}" for field in Settings.model_fields}
    assert service["environment"].keys() <= settings
    needed = {
        "FOREWORD_REDIS_URL",
        "FOREWORD_SHARED_DIR",
        "FOREWORD_API_KEYS_FILE",
    }  # the worker's metrics name tenants
    assert needed <= service["environment"].keys()
    assert f"shared:{service['environment']['FOREWORD_SHARED_DIR']}" in service["volumes"]
    assert any(volume.rpartition(":")[2] == "/data" for volume in service["volumes"])


def test_apis_count_apart() -> None:
    """On one data folder each would show the counts of all (service.metrics_folder), and each is a target."""
    assert "/data" in load("compose.yaml")["services"]["api"]["volumes"]


def test_redis_keeps_everything() -> None:
    command = " ".join(load("compose.yaml")["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


def test_every_file_and_volume_is_there() -> None:
    compose = load("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source, _, target = volume.partition(":")
            if not target:  # an anonymous volume
                continue
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in compose["volumes"], source
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()


def test_prometheus_watches_both() -> None:
    compose, config = load("compose.yaml"), load("compose/prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "foreword", "what rules and dashboard ask for"
    assert {(where["names"][0], where["port"]) for where in job["dns_sd_configs"]} == {("api", 8000), ("worker", 9100)}
    mounted = {volume.split(":")[1] for volume in compose["services"]["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= mounted
