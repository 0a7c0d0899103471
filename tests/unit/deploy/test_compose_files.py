"""What docker-compose.yml and .env.example promise: every setting, nothing published by accident, few rights."""

from __future__ import annotations

import re

import pytest
import yaml

from deploy.compose_settings import compose_settings, variable_names
from deploy.docker.requirements import requirements
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig
from outrider.wire.settings.system import SystemConfig
from tests.unit.deploy.compose_files import REPO, compose, services

BINDS = {
    "gateway": {"8000": "OUTRIDER_BIND", "8001": "OUTRIDER_BIND", "9000": "OUTRIDER_METRICS_BIND"},
    "prometheus": {"9090": "PROMETHEUS_BIND"},
    "grafana": {"3000": "GRAFANA_BIND"},
}
"""By service and port: the variable that opens it to others, and nothing else."""
POOLS = ("cluster.yaml", "cluster-model.yaml", "cluster-model-draft.yaml")
MODELS = {"OUTRIDER_TARGET_MODEL": "/models/target/chat", "OUTRIDER_DRAFT_MODEL": "/models/draft/small"}


def pools(name: str, monkeypatch: pytest.MonkeyPatch) -> SystemConfig:
    """Read a file of pools as the launcher does, with MODEL and DRAFT in its environment."""
    for variable, path in MODELS.items():
        monkeypatch.setenv(variable, path)
    return SystemConfig.read(yaml.safe_load((REPO / "deploy/docker" / name).read_text()))


@pytest.mark.parametrize("name", sorted(services()))
def test_a_container_has_no_rights_to_spare(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"cpus", "memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    if name == "check":  # it ends by itself
        assert service["restart"] == "no"
    else:
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"]
    assert not {"privileged", "cap_add", "pid", "ipc", "network_mode", "user"} & set(service)


def test_only_front_ends_are_published_and_to_this_machine_alone() -> None:
    ports = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert set(ports) == set(BINDS)
    for name, group in ports.items():
        binds = {port.rpartition(":")[2]: port.partition("}:")[0] for port in group}
        assert binds == {port: f"${{{variable}:-127.0.0.1" for port, variable in BINDS[name].items()}
    assert all(service["networks"] == ["cluster"] for name, service in services().items() if name not in BINDS)


def test_the_gateways_image_has_no_torch_and_no_ray() -> None:
    text = (REPO / "deploy/docker/gateway.Dockerfile").read_text()
    extras = re.findall(r"requirements\.py ([a-z ]+)>", text)[0].split()
    names = {re.split(r"[^a-z0-9-]", line)[0] for line in requirements(REPO / "pyproject.toml", extras)}
    assert "grpcio" in names
    assert not names & {"torch", "transformers", "ray", "torchao"}


def test_every_part_has_the_time_that_it_may_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target has no less than the gateway: where both are replaced, streams end on the target that goes."""
    gateway_s = GatewayConfig.model_fields["drain_timeout_s"].default
    workers = [pool.worker.drain_timeout_s for name in POOLS for pool in pools(name, monkeypatch).pools]
    assert min(workers) >= gateway_s
    for name in ("draft", "target", "gateway"):
        grace = re.fullmatch(r"\$\{OUTRIDER_STOP_GRACE:-(\d+)s\}", services()[name]["stop_grace_period"])
        assert grace is not None, name
        assert int(grace[1]) >= max(gateway_s, *workers) + 15, name


def test_a_service_has_its_own_settings_and_no_others() -> None:
    """A setting of the gateway in .env is no change of a worker's container, nor the reverse; the check has all."""
    assert (REPO / "deploy/docker/settings.yml").read_text() == compose_settings(), "run make env-example"
    given = {name: one["environment"] for name, one in compose("deploy/docker/settings.yml")["services"].items()}
    assert given == {
        "gateway": variable_names(GatewayConfig),
        "launcher": [*variable_names(TargetConfig), *variable_names(DraftConfig)],
    }
    with_file = {name for name, service in services().items() if "env_file" in service}
    extended = {name: service["extends"]["service"] for name, service in services().items() if "extends" in service}
    assert with_file == {"check"}
    assert extended.pop("draft").startswith("draft$")
    assert extended == {name: name for name in given}
