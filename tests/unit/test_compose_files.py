"""What docker-compose.yml and .env.example promise: every setting, nothing published by accident, few rights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.docker.requirements import requirements
from deploy.env_example import env_example
from outrider.wire.origin import read_host_names
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig, check_variables, load
from outrider.wire.settings.system import SystemConfig

REPO = Path(__file__).resolve().parents[2]
SETTINGS = {
    f"{cls.model_config['env_prefix']}{name}".upper()
    for cls in (GatewayConfig, DraftConfig, TargetConfig)
    for name in cls.model_fields
}
PUBLISHED = {"gateway": "OUTRIDER_BIND", "prometheus": "PROMETHEUS_BIND", "grafana": "GRAFANA_BIND"}
"""By service: the variable that opens it to others, and nothing else."""


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((REPO / name).read_text())
    return values


def services() -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"]
    return found


def in_example() -> set[str]:
    return set(re.findall(r"^#([A-Z][A-Za-z_]*)=", (REPO / ".env.example").read_text(), re.MULTILINE))


def in_compose_files() -> set[str]:
    text = "".join((REPO / name).read_text() for name in ("docker-compose.yml", "docker-compose.gpu.yml"))
    return set(re.findall(r"\$\{([A-Z_]+)", text))


def test_a_part_takes_no_variable_of_compose_for_a_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in in_example() | in_compose_files():
        monkeypatch.setenv(name, "1")
    check_variables(GatewayConfig)


def test_env_example_is_what_the_settings_say() -> None:
    assert (REPO / ".env.example").read_text() == env_example(), "run make env-example"
    assert in_example() >= SETTINGS


def test_env_example_names_every_variable_of_the_compose_files_and_no_other() -> None:
    assert in_example() - SETTINGS == in_compose_files() - SETTINGS


@pytest.mark.parametrize("name", sorted(services()))
def test_a_container_has_no_rights_to_spare(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert {"cpus", "memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    assert service["healthcheck"]["test"]
    assert not {"privileged", "cap_add", "pid", "ipc", "network_mode", "user"} & set(service)


def test_only_front_ends_are_published_and_to_this_machine_alone() -> None:
    ports = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert set(ports) == set(PUBLISHED)
    for name, group in ports.items():
        assert all(port.startswith(f"${{{PUBLISHED[name]}:-127.0.0.1}}:") for port in group), name
    assert all(service["networks"] == ["cluster"] for name, service in services().items() if name not in PUBLISHED)


def test_the_gateways_image_has_no_torch_and_no_ray() -> None:
    text = (REPO / "deploy/docker/gateway.Dockerfile").read_text()
    extras = re.findall(r"requirements\.py ([a-z ]+)>", text)[0].split()
    names = {re.split(r"[^a-z0-9-]", line)[0] for line in requirements(REPO / "pyproject.toml", extras)}
    assert "grpcio" in names
    assert not names & {"torch", "transformers", "ray", "torchao"}


def test_what_is_mounted_is_there() -> None:
    """A path that is missing would be made by the engine, as an empty folder of root's."""
    for service in services().values():
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{[A-Z_]+:-([^}]+)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (REPO / source).exists(), source


def test_every_part_has_the_time_that_it_may_drain() -> None:
    config = SystemConfig.read(yaml.safe_load((REPO / "deploy/docker/cluster.yaml").read_text()))
    longest_s = max(
        GatewayConfig.model_fields["drain_timeout_s"].default, *(pool.worker.drain_timeout_s for pool in config.pools)
    )
    for name in ("ray-head", "draft", "target", "gateway"):
        grace = re.fullmatch(r"\$\{OUTRIDER_STOP_GRACE:-(\d+)s\}", services()[name]["stop_grace_period"])
        assert grace is not None, name
        assert int(grace[1]) >= longest_s + 15, name


def test_one_gpu_for_each_worker() -> None:
    found = compose("docker-compose.gpu.yml")["services"]
    devices = {name: service["deploy"]["resources"]["reservations"]["devices"] for name, service in found.items()}
    assert set(devices) == {"draft", "target"}
    assert all(len(one) == 1 and one[0]["driver"] == "nvidia" for one in devices.values())


@pytest.mark.parametrize("said", ["", "llm.example", "*"])
def test_prometheus_may_call_the_gateway_by_its_name_whatever_hosts_are_allowed(said: str) -> None:
    value = services()["gateway"]["environment"]["OUTRIDER_GATEWAY_ALLOWED_HOSTS"]
    names = read_host_names(value.replace("${OUTRIDER_GATEWAY_ALLOWED_HOSTS:-}", said))
    assert names is None if said == "*" else names == {"gateway", said} - {""}
    prometheus = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())
    targets = [
        one for job in prometheus["scrape_configs"] for each in job.get("static_configs", ()) for one in each["targets"]
    ]
    assert "gateway:8000" in targets


def test_the_pools_are_those_that_the_containers_are_for() -> None:
    """Their ports are the ones that the health checks ask, their labels those of the nodes."""
    config = SystemConfig.read(yaml.safe_load((REPO / "deploy/docker/cluster.yaml").read_text()))
    assert config.ray is not None
    assert config.ray.address == "auto"
    for pool in config.pools:
        service = services()[pool.role]
        assert service["healthcheck"]["test"][-1] == f"hostname:{pool.worker.port}"
        labels = ",".join(f"{key}={value}" for key, value in pool.labels.items())
        assert service["environment"]["OUTRIDER_NODE_LABELS"] == labels


def test_the_gateways_command_is_taken() -> None:
    config = load(GatewayConfig, compose()["services"]["gateway"]["command"])
    assert (config.registry, config.port, config.grpc_port) == ("ray-head:7000", 8000, 8001)
