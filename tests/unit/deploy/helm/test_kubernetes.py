"""The Helm chart: its manifests fit the schemas and each other, and say to each part what the part understands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy import node_drain
from deploy.docker import container_health
from gateway.workers.membership import DNS, from_config
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.settings.system import SystemConfig
from outrider.wire.transport import tls
from tests.kubernetes.chart import (
    CHART,
    EXAMPLES,
    FULLNAME,
    RELEASE,
    Manifest,
    complaints,
    example,
    values_of,
)
from tests.kubernetes.check import (
    Settings,
    launcher_settings,
    pods,
    problem,
    selects,
    settings,
    variables,
)
from tests.unit.deploy.helm.rendered import container, gateway

NAMES = [path.stem for path in EXAMPLES]
VALUES = {path.stem: values_of(path) for path in EXAMPLES}
WORKERS = ("target", "draft")
WITH_ALL = ("plain", "kuberay")


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in example(name) if one["kind"] == kind}


def containers(name: str) -> list[tuple[dict[str, str], dict[str, Any]]]:
    return [(labels, container) for labels, spec in pods(example(name)) for container in spec["containers"]]


def launcher() -> SystemConfig:
    return launcher_settings(of_kind("kuberay", "ConfigMap")[f"{FULLNAME}-cluster"])


@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_fits_its_schema(name: str) -> None:
    for manifest in example(name):
        assert problem(manifest) is None, manifest["metadata"]["name"]


@pytest.mark.parametrize("name", [*WITH_ALL, "monitored"])
def test_the_linter_has_no_complaint(name: str) -> None:
    assert complaints(VALUES[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_finds_pods(name: str) -> None:
    labels = [found for found, _ in pods(example(name))]
    selectors = [one["spec"]["selector"] for one in of_kind(name, "PodDisruptionBudget").values()]
    selectors += [{"matchLabels": one["spec"]["selector"]} for one in of_kind(name, "Service").values()]
    selectors += [one["spec"]["selector"] for one in of_kind(name, "InferencePool").values()]
    for policy in of_kind(name, "NetworkPolicy").values():
        selectors.append(policy["spec"]["podSelector"])
        sources = [source for rule in policy["spec"]["ingress"] for source in rule.get("from", ())]
        selectors += [source["podSelector"] for source in sources if "podSelector" in source]
    for selector in selectors:
        assert any(selects(selector, found) for found in labels), selector
        assert all(found["app.kubernetes.io/instance"] == RELEASE for found in labels if selects(selector, found))


@pytest.mark.parametrize("name", NAMES)
def test_no_pod_is_open_to_whoever_comes(name: str) -> None:
    """A pod that no policy is about would be."""
    policies = [one["spec"]["podSelector"] for one in of_kind(name, "NetworkPolicy").values()]
    for labels, _ in pods(example(name)):
        assert any(selects(policy, labels) for policy in policies), labels


@pytest.mark.parametrize("name", NAMES)
def test_every_port_that_is_named_exists(name: str) -> None:
    """Also of a probe: what it asks is where the container listens."""
    names = {port["name"] for _, each in containers(name) for port in each["ports"]}
    wanted = {port["targetPort"] for one in of_kind(name, "Service").values() for port in one["spec"]["ports"]}
    for policy in of_kind(name, "NetworkPolicy").values():
        wanted |= {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
    assert wanted <= names
    for _, each in containers(name):
        numbers = {str(port["containerPort"]) for port in each["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = each.get(probe, {})
            if "grpc" in asked:
                assert str(asked["grpc"]["port"]) in numbers
            if "httpGet" in asked:
                assert asked["httpGet"]["port"] in {port["name"] for port in each["ports"]}
            *_, kind, address = asked.get("exec", {}).get("command", ("tcp", ":" + min(numbers)))
            assert kind in container_health.CHECKS
            assert address.rpartition(":")[2] in numbers


@pytest.mark.parametrize("name", NAMES)
def test_pods_have_no_rights_to_spare(name: str) -> None:
    for labels, spec in pods(example(name)):
        assert spec["securityContext"]["runAsNonRoot"] is True, labels
        assert spec["automountServiceAccountToken"] is False, labels
        assert spec["enableServiceLinks"] is False, "OUTRIDER_GATEWAY_PORT is a setting of ours"
    for labels, each in containers(name):
        context = each["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, labels
        assert context["allowPrivilegeEscalation"] is False, labels
        assert context["capabilities"] == {"drop": ["ALL"]}, labels
        assert {"cpu", "memory"} <= set(each["resources"]["limits"]), labels
        assert "readinessProbe" in each, labels


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_nobody_is_ended_while_models_are_loaded(path: Path) -> None:
    """A gateway whose targets load is not ready; a probe that ended it would bring none."""
    limit_s = (values_of(CHART / "values.yaml") | values_of(path))["loadTimeoutSeconds"]
    for labels, each in containers(path.stem):
        assert "livenessProbe" in each, labels
        if labels["app.kubernetes.io/component"] == "gateway":
            asked = {each[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")}
            assert asked == {"/healthz"}, "which is of the event loop, not of targets"
            assert each["readinessProbe"]["httpGet"]["path"] == "/readyz"
        elif labels["app.kubernetes.io/component"] in WORKERS and path.stem != "kuberay":
            probe = each["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] == limit_s
    for name, deployment in of_kind(path.stem, "Deployment").items():
        if not name.endswith("-launcher"):
            assert deployment["spec"]["progressDeadlineSeconds"] > limit_s, "kubectl rollout status would give up"


def test_gateways_find_the_workers_of_their_pools_by_the_services() -> None:
    services = of_kind("plain", "Service")
    deployments = of_kind("plain", "Deployment")
    for pool, drafts, served in (("chat", ["small"], "llama-3b"), ("code", ["small", "copies"], None)):
        membership = from_config(gateway("plain", f"{FULLNAME}-gateway-{pool}"))
        assert [one.name for one in membership.pools] == [pool, *drafts]
        assert membership.pools[0].model_name == served
        for member in membership.members:
            host, _, port = member.address.removeprefix(DNS).rpartition(":")
            assert member.address.startswith(DNS)
            assert host == f"{FULLNAME}-{member.pool}"
            assert services[host]["spec"]["clusterIP"] == "None", "its name has the addresses of its pods"
            template = deployments[host]["spec"]["template"]
            assert services[host]["spec"]["selector"] == template["metadata"]["labels"]
            assert variables(template["spec"]["containers"][0])[f"OUTRIDER_{member.role.upper()}_PORT"] == port


def test_a_pods_settings_are_those_of_its_pool() -> None:
    read: dict[str, Settings] = {}
    for pool, role in (("chat", "target"), ("code", "target"), ("small", "draft"), ("copies", "draft")):
        found = container("plain", f"{FULLNAME}-{pool}")
        assert found["args"] == ["python", "-m", f"{role}_service"]
        read[pool] = settings(found)
    chat, code, small, copies = read.values()
    assert isinstance(chat, TargetConfig)
    assert (chat.model, chat.max_slots, chat.kv_cache_tokens, chat.prefix_caching) == (
        "/models/llama-3b",
        64,
        1048576,
        False,
    )
    assert (chat.host, chat.port, chat.metrics_port, chat.tls_dir) == ("10.0.0.1", 7200, 9200, "/etc/outrider/secrets")
    assert isinstance(code, TargetConfig) and code.tensor_parallel == 4
    assert isinstance(small, DraftConfig) and small.target_model == chat.model, "in case it is a head"
    assert isinstance(copies, DraftConfig) and (copies.drafter, copies.model) == ("lookup", code.model)
    served = gateway("plain", f"{FULLNAME}-gateway-chat")
    assert (served.max_running, served.page, served.drain_timeout_s) == (48, False, 0)


def test_the_pools_of_a_ray_cluster_find_their_nodes() -> None:
    config = launcher()
    assert config.ray is not None
    assert config.ray.name is not None, "a launcher that is started again must take over what runs"
    groups = of_kind("kuberay", "RayCluster")[FULLNAME]["spec"]["workerGroupSpecs"]
    for pool in config.pools:
        (group,) = [one for one in groups if pool.labels.items() <= one["labels"].items()]
        ports = {one["name"]: one["containerPort"] for one in group["template"]["spec"]["containers"][0]["ports"]}
        assert (ports["grpc"], ports["metrics"]) == (pool.worker.port, pool.worker.metrics_port)
        assert pool.max == group["replicas"]
        assert pool.num_cpus == float(group["resources"]["CPU"]), "a node holds one worker: their ports are the same"
        assert (pool.num_gpus or 0) == float(group["resources"].get("GPU", 0))
    assert [(pool.name, pool.count, pool.max, pool.serves) for pool in config.pools] == [
        ("chat", 2, 8, ()),
        ("code", 1, 1, ()),
        ("copies", 1, 1, ("code",)),
        ("small", 1, 4, ("chat", "code")),
    ]
    registry = gateway("kuberay", f"{FULLNAME}-gateway").registry
    (port,) = of_kind("kuberay", "Service")[f"{FULLNAME}-launcher"]["spec"]["ports"]
    assert registry == f"{FULLNAME}-launcher:{port['port']}"
    assert (config.targets[0].model_name, config.targets[0].worker.kv_cache_tokens) == ("llama-3b", 1048576)


@pytest.mark.parametrize("name", WITH_ALL)
def test_a_pod_drains_its_worker_before_it_ends_and_has_the_time(name: str) -> None:
    graces = {
        labels["outrider/pool"]: spec["terminationGracePeriodSeconds"]
        for labels, spec in pods(example(name))
        if labels["app.kubernetes.io/component"] in WORKERS
    }
    assert graces == {"chat": 151, "code": 65, "small": 65, "copies": 65}, "60 s more than it drains"
    if name == "kuberay":
        for group in of_kind(name, "RayCluster")[FULLNAME]["spec"]["workerGroupSpecs"]:
            command = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert command == ["python", "-m", node_drain.__name__]


@pytest.mark.parametrize(("name", "deployment"), [("plain", "gateway-chat"), ("kuberay", "gateway")])
def test_secrets_are_where_the_parts_look(name: str, deployment: str) -> None:
    read = gateway(name, f"{FULLNAME}-{deployment}")
    spec = of_kind(name, "Deployment")[f"{FULLNAME}-{deployment}"]["spec"]["template"]["spec"]
    assert _secrets(spec) == {
        read.tls_dir: ["outrider-tls-gateway"],
        read.public_tls_dir: ["public", "public"],
        str(read.api_keys).rpartition("/")[0]: ["keys"],
    }
    (public,) = [volume["projected"]["sources"] for volume in spec["volumes"] if "projected" in volume]
    (renamed,) = [one["secret"] for one in public if "items" in one["secret"]]
    assert renamed["optional"] is True, "one of `outrider certs` has no such keys"
    assert [one["path"] for one in renamed["items"]] == [tls.CERTIFICATE, tls.KEY]
    for labels, pod in pods(example(name)):
        role = labels["app.kubernetes.io/component"]
        if role in WORKERS:
            assert _secrets(pod) == {str(container_health.TLS_DIR): [f"outrider-tls-{role}", "hub"]}
    if name == "kuberay":
        config = launcher()
        assert config.ray is not None
        assert {config.ray.tls_dir, *(pool.worker.tls_dir for pool in config.pools)} == {str(container_health.TLS_DIR)}
        pod = of_kind(name, "Deployment")[f"{FULLNAME}-launcher"]["spec"]["template"]["spec"]
        assert _secrets(pod) == {str(container_health.TLS_DIR): ["outrider-tls-launcher"]}


def _secrets(pod: dict[str, Any]) -> dict[str | None, list[str]]:
    """Names of Secrets by where they are mounted. Only their owner and group may read them."""
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    found: dict[str | None, list[str]] = {}
    for volume in pod["volumes"]:
        if "secret" in volume or "projected" in volume:
            assert (volume.get("secret") or volume["projected"])["defaultMode"] == 0o440, "tls.py warns of an open key"
        if "secret" in volume:
            found[mounts[volume["name"]]] = [volume["secret"]["secretName"]]
        if "projected" in volume:
            found[mounts[volume["name"]]] = [one["secret"]["name"] for one in volume["projected"]["sources"]]
    return found


def test_keda_sizes_pools_that_no_release_sizes() -> None:
    """What its queries return is asked of a real Prometheus, by tests/e2e/test_keda_queries.py."""
    scaled = of_kind("plain", "ScaledObject")
    assert {name: (one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]) for name, one in scaled.items()} == {
        f"{FULLNAME}-chat": (2, 8),
        f"{FULLNAME}-small": (1, 4),
    }
    for name, deployment in of_kind("plain", "Deployment").items():
        assert ("replicas" in deployment["spec"]) is (name not in scaled), "an upgrade would undo what KEDA did"
    assert {name: one["spec"]["scaleTargetRef"]["name"] for name, one in scaled.items()} == {
        name: name for name in scaled
    }


def test_the_metrics_of_gateways_are_for_prometheus_alone() -> None:
    (policy,) = [one for name, one in of_kind("monitored", "NetworkPolicy").items() if name.endswith("-gateways")]
    users, prometheus = policy["spec"]["ingress"]
    assert "from" not in users and {port["port"] for port in users["ports"]} == {"http", "grpc"}
    assert {port["port"] for port in prometheus["ports"]} == {"metrics"}
    (source,) = prometheus["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    assert gateway("monitored", f"{FULLNAME}-gateway-demo").metrics_port == 9000
