"""What docker-compose.yml and .env.example promise: every setting, nothing published by accident, few rights."""

import re
from typing import Any

import pytest
import yaml

from deploy.compose_settings import compose_settings, variable_names
from deploy.docker.requirements import requirements
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig, check_variables, load
from outrider.wire.settings.system import SystemConfig
from tests.unit.deploy.compose_files import REPO, compose, in_compose_files, in_example, services

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


def _conditions(service: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    depends_on = service.get("depends_on", {})
    return list(depends_on.items()) if isinstance(depends_on, dict) else []


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


def test_what_is_mounted_is_there() -> None:
    """A path that is missing would be made by the engine, as an empty folder of root's."""
    for service in services().values():
        for volume in service.get("volumes", ()):
            if isinstance(volume, dict):
                assert volume["bind"] == {"create_host_path": False}  # the engine refuses one that is missing
                continue
            source = re.sub(r"\$\{[A-Z_]+:-([^}]+)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (REPO / source).exists(), source


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


@pytest.mark.parametrize("name", POOLS)
def test_the_pools_match_the_containers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ports are the ones that the health checks ask, their labels those of the nodes."""
    config = pools(name, monkeypatch)
    assert config.ray is not None
    assert (config.ray.address, config.ray.name) == ("auto", "outrider")
    for pool in config.pools:
        service = services()[pool.role]
        assert service["healthcheck"]["test"][-1] == f"hostname:{pool.worker.port}"
        labels = ",".join(f"{key}={value}" for key, value in pool.labels.items())
        assert service["environment"]["OUTRIDER_NODE_LABELS"] == labels


def test_a_model_of_ones_own_has_its_folders_name(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, pair = (pools(name, monkeypatch) for name in POOLS[1:])
    assert [pool.worker.model for pool in alone.pools] == [MODELS["OUTRIDER_TARGET_MODEL"]]
    assert [pool.worker.model for pool in pair.pools] == list(MODELS.values())
    assert {pool.model_name for pool in (*alone.pools, *pair.pools)} == {None}
    variants = compose("deploy/docker/draft.yml")["services"]
    assert variants == {"draft": {}, "draft-of-model": {"scale": 0}, "draft-of-model-named": {}}


def test_an_image_is_built_once() -> None:
    built = [service["image"] for service in services().values() if "build" in service]
    assert len(built) == len(set(built)) == 2
    assert {service["image"] for service in services().values() if "outrider" in service["image"]} == set(built)


def test_all_that_belongs_to_a_cluster_ends_before_its_head() -> None:
    """Compose stops who depends on a container with `restart` before it replaces that container, dependents first."""
    for name in ("launcher", "draft", "target", "gateway"):
        assert services()[name]["depends_on"]["ray-head"] == {"condition": "service_healthy", "restart": True}, name
    assert {"launcher", "draft", "target"} <= set(services()["gateway"]["depends_on"])
    restarting = {on for one in services().values() for on, how in _conditions(one) if how.get("restart")}
    assert restarting == {"ray-head"}, "a target that is replaced leaves its gateway as it is"


def test_a_gpu_for_each_worker_which_may_be_the_same() -> None:
    """With which budgets: test_gpu_shares.py. The launcher sees the sizes of the models for it."""
    found = compose("docker-compose.gpu.yml")["services"]
    mounted = [volume["target"] for volume in services()["launcher"]["volumes"] if isinstance(volume, dict)]
    assert {"/models/target/${MODEL:-demo}", "/models/draft/${DRAFT:-demo}"} <= set(mounted)
    devices = {name: service["deploy"]["resources"]["reservations"]["devices"] for name, service in found.items()}
    assert set(devices) == {"draft", "target"}
    assert all(len(one) == 1 and one[0]["driver"] == "nvidia" for one in devices.values())


def test_what_libraries_compile_for_a_gpu_is_kept_where_the_disk_can_be_written() -> None:
    cache = "/var/cache/outrider"
    text = (REPO / "deploy/docker/worker.Dockerfile").read_text()
    for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert re.search(rf"\b{name}={cache}/\w+", text), name
    assert all(f"{role}-cache:{cache}" in services()[role]["volumes"] for role in ("draft", "target"))
    chart = (REPO / "deploy/helm/outrider/templates/_helpers.tpl").read_text()
    assert f"{{name: cache, mountPath: {cache}}}" in chart


def test_the_gateways_command_is_taken() -> None:
    """Prometheus reads the metrics port, in plain HTTP whatever users speak."""
    config = load(GatewayConfig, services()["gateway"]["command"])
    assert (config.registry, config.port, config.grpc_port) == ("launcher:7000", 8000, 8001)
    jobs = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    address = f"gateway:{config.metrics_port}"
    assert [jobs[0]["static_configs"], jobs[1]["http_sd_configs"][0]["url"]] == [
        [{"targets": [address]}],
        f"http://{address}/sd",
    ]


def test_a_part_takes_no_variable_of_compose_for_a_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in in_example() | in_compose_files():
        monkeypatch.setenv(name, "1")
    check_variables(GatewayConfig)
