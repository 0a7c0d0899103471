"""The Kubernetes manifests fit the schemas, each other, and the pools that the launcher is told of."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import node_drain
from deploy.launcher import read_config
from outrider.wire.processes import StopFlag
from outrider.wire.settings.config import GatewayConfig, load
from outrider.wire.settings.system import SystemConfig
from tests.kubernetes.__main__ import manifests_by_source
from tests.kubernetes.build import Manifest, built
from tests.kubernetes.check import FOLDER, pods, problem, selects

BASE = built(FOLDER / "base")
SECURED = built(FOLDER / "overlays/secured")


def of_kind(kind: str) -> list[Manifest]:
    return [one for one in BASE if one["kind"] == kind]


def containers() -> list[tuple[dict[str, str], dict[str, Any]]]:
    return [(labels, container) for labels, spec in pods(BASE) for container in spec["containers"]]


@pytest.mark.parametrize("source", manifests_by_source())
def test_every_manifest_fits_its_schema(source: str) -> None:
    for manifest in manifests_by_source()[source]:
        assert problem(manifest) is None, manifest["metadata"]["name"]


def test_every_selector_finds_pods() -> None:
    labels = [found for found, _ in pods(BASE)]
    selectors = [one["spec"]["selector"] for one in BASE if one["kind"] == "PodDisruptionBudget"]
    selectors += [{"matchLabels": one["spec"]["selector"]} for one in of_kind("Service")]
    for policy in of_kind("NetworkPolicy"):
        selectors.append(policy["spec"]["podSelector"])
        sources = [source for rule in policy["spec"].get("ingress", ()) for source in rule.get("from", ())]
        selectors += [source["podSelector"] for source in sources if "podSelector" in source]
    for selector in selectors:
        assert any(selects(selector, found) for found in labels), selector
    services = [one["metadata"]["labels"] for one in of_kind("Service")]
    assert any(selects(of_kind("ServiceMonitor")[0]["spec"]["selector"], found) for found in services)


def test_every_port_that_is_named_exists() -> None:
    names = {port["name"] for _, container in containers() for port in container.get("ports", ())}
    wanted = {port["targetPort"] for one in of_kind("Service") for port in one["spec"]["ports"]}
    for policy in of_kind("NetworkPolicy"):
        wanted |= {port["port"] for rule in policy["spec"].get("ingress", ()) for port in rule.get("ports", ())}
    assert wanted <= names
    service = {port["name"]: port["port"] for one in of_kind("Service") for port in one["spec"]["ports"]}
    assert {one["port"] for one in of_kind("ServiceMonitor")[0]["spec"]["endpoints"]} <= set(service)
    (discovery,) = of_kind("ScrapeConfig")[0]["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"http://gateway.outrider.svc:{service['http']}/sd"


def test_scraped_as_alerts_and_dashboards_ask() -> None:
    """Jobs by name; workers by the list that a gateway gives, so that a member is called the same in all series."""
    ours = yaml.safe_load((FOLDER.parent / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    (gateways,) = of_kind("ServiceMonitor")[0]["spec"]["endpoints"]
    jobs = {one["replacement"] for one in gateways["relabelings"] if one["targetLabel"] == "job"}
    workers = of_kind("ScrapeConfig")[0]["spec"]
    assert jobs | {workers["jobName"]} == {one["job_name"] for one in ours}
    assert [one["url"].rpartition("/")[2] for one in workers["httpSDConfigs"]] == ["sd"]


def test_the_pools_find_their_nodes() -> None:
    config = SystemConfig.read(yaml.safe_load(of_kind("ConfigMap")[0]["data"]["cluster.yaml"]))
    assert config.ray is not None
    assert config.ray.name is not None, "a launcher that is started again must take over what runs"
    groups = of_kind("RayCluster")[0]["spec"]["workerGroupSpecs"]
    for pool in config.pools:
        (group,) = [one for one in groups if one["labels"] == pool.labels]
        ports = {one["name"]: one["containerPort"] for one in group["template"]["spec"]["containers"][0]["ports"]}
        assert (ports["grpc"], ports["metrics"]) == (pool.worker.port, pool.worker.metrics_port)
        assert pool.max <= group["replicas"]
        assert pool.num_cpus == float(group["resources"]["CPU"]), "a node holds one worker: their ports are the same"


def test_a_pod_drains_its_worker_before_ray_ends_and_has_the_time() -> None:
    config = SystemConfig.read(yaml.safe_load(of_kind("ConfigMap")[0]["data"]["cluster.yaml"]))
    longest_s = max(pool.worker.drain_timeout_s for pool in config.pools)
    for group in of_kind("RayCluster")[0]["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", node_drain.__name__]
        assert pod["terminationGracePeriodSeconds"] >= longest_s + 15


def test_pods_have_no_rights_to_spare() -> None:
    for labels, spec in pods(BASE):
        assert spec["securityContext"]["runAsNonRoot"] is True, labels
        assert spec["automountServiceAccountToken"] is False, labels
    for labels, container in containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, labels
        assert context["allowPrivilegeEscalation"] is False, labels
        assert context["capabilities"] == {"drop": ["ALL"]}, labels
        assert {"cpu", "memory"} <= set(container["resources"]["limits"]), labels
        assert {"readinessProbe", "livenessProbe"} <= set(container), labels


def test_the_secured_overlay_says_where_the_secrets_are_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, launcher = (_container("Deployment", name) for name in ("gateway", "launcher"))
    for name, value in _variables(gateway).items():
        monkeypatch.setenv(name, value)
    settings = load(GatewayConfig, ["--registry", "launcher:7000"])
    assert {settings.tls_dir, settings.public_tls_dir} <= _mounts(gateway)
    assert str(settings.api_keys).rpartition("/")[0] in _mounts(gateway)
    pools = tmp_path / "cluster.yaml"
    (text,) = [one["data"]["cluster.yaml"] for one in SECURED if one["kind"] == "ConfigMap"]
    pools.write_text(text)
    for name, value in _variables(launcher).items():
        monkeypatch.setenv(name, value)
    config = read_config(["--config", str(pools)], StopFlag())
    assert config.ray is not None
    assert {config.ray.tls_dir, *(pool.worker.tls_dir for pool in config.pools)} == {settings.tls_dir}
    assert {settings.tls_dir} <= _mounts(launcher)


def test_what_the_secured_overlay_serves_by_tls_is_named_so() -> None:
    """To ingresses and meshes, and to Prometheus; workers' metrics are plain."""
    of_gateway = [one["spec"] for one in SECURED if one["kind"] in ("Service", "ServiceMonitor")]
    text = json.dumps([*of_gateway, *(one["spec"] for one in SECURED if one["kind"] == "ScrapeConfig")])
    assert "h2c" not in text
    assert "http://" not in text
    (service,) = [one for one in SECURED if one["kind"] == "Service" and one["metadata"]["name"] == "gateway"]
    assert {port["appProtocol"] for port in service["spec"]["ports"]} == {"https"}
    (monitor,) = [one for one in SECURED if one["kind"] == "ServiceMonitor"]
    assert {one["scheme"] for one in monitor["spec"]["endpoints"]} == {"https"}


def _container(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in SECURED if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    container: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return container


def _variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def _mounts(container: dict[str, Any]) -> set[str]:
    return {one["mountPath"] for one in container["volumeMounts"]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_what_we_checked() -> None:
    for folder in ("base", "overlays/gpu", "overlays/secured"):
        text = subprocess.run(
            ["kubectl", "kustomize", str(FOLDER / folder)], check=True, capture_output=True, text=True, timeout=30
        ).stdout
        theirs = [one for one in yaml.safe_load_all(text) if one]
        assert sorted(one["kind"] for one in theirs) == sorted(one["kind"] for one in built(FOLDER / folder))
        (one,) = [one for one in theirs if one["kind"] == "RayCluster"]
        (ours,) = [one for one in built(FOLDER / folder) if one["kind"] == "RayCluster"]
        assert one["spec"]["workerGroupSpecs"][1]["resources"] == ours["spec"]["workerGroupSpecs"][1]["resources"]
