"""The Helm chart: its manifests fit the schemas and each other, and say to each part what the part understands."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import node_drain
from deploy.docker import health
from deploy.release.__main__ import pack
from gateway.workers.membership import DNS, from_config
from gateway.workers.named_workers import LOOK_S
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import SystemConfig
from tests.forked import REPO
from tests.kubernetes.__main__ import main
from tests.kubernetes.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    HelmError,
    Manifest,
    complaints,
    example,
    rendered,
    values_of,
)
from tests.kubernetes.check import Settings, launcher_settings, pods, problem, selects, settings, variables

NAMES = [path.stem for path in EXAMPLES]
WORKERS = ("target", "draft")
WITH_ALL = ("plain", "kuberay")


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in example(name) if one["kind"] == kind}


def containers(name: str) -> list[tuple[dict[str, str], dict[str, Any]]]:
    return [(labels, container) for labels, spec in pods(example(name)) for container in spec["containers"]]


def container(name: str, deployment: str) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(name, "Deployment")[deployment]["spec"]["template"]["spec"]["containers"][0]
    return found


def gateway(name: str, deployment: str) -> GatewayConfig:
    read = settings(container(name, deployment))
    assert isinstance(read, GatewayConfig)
    return read


def launcher() -> SystemConfig:
    return launcher_settings(of_kind("kuberay", "ConfigMap")[f"{RELEASE}-cluster"])


@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_fits_its_schema(name: str) -> None:
    for manifest in example(name):
        assert problem(manifest) is None, manifest["metadata"]["name"]


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_the_linter_has_no_complaint(path: Path) -> None:
    assert complaints(values_of(path)) == []


TARGET = {"name": "t", "model": "m", "replicas": 2, "cpu": 1, "memory": "1Gi"}
POOL = TARGET | {"name": "d", "serves": ["demo"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kubray": True}, "'kubray' not allowed"),
        ({"drafts": [POOL | {"name": "A b"}]}, "'A b' does not match"),
        ({"drafts": [POOL | {"settings": {"maxSlots": 4}}]}, "'maxSlots' does not match"),
        ({"drafts": [POOL | {"serves": ["chat"]}]}, "d serves chat, which is no target pool; there are demo"),
        ({"drafts": [POOL | {"name": "demo"}]}, "two pools have one name: demo, demo"),
        ({"drafts": [POOL | {"maxReplicas": 4}]}, "pool d has one of maxReplicas and answersPerReplica"),
        ({"drafts": [POOL | {"answersPerReplica": 4}]}, "pool d has one of maxReplicas and answersPerReplica"),
        (
            {"drafts": [POOL | {"maxReplicas": 1, "answersPerReplica": 4}]},
            "pool d has replicas 2, and maxReplicas 1",
        ),
        (
            {"kuberay": True, "drafts": [POOL | {"maxReplicas": 4, "answersPerReplica": 4}]},
            "pool d has answersPerReplica, which is for KEDA, and kuberay is on",
        ),
        (
            {"drafts": [POOL | {"maxReplicas": 4, "answersPerReplica": 4}]},
            "pool d has maxReplicas, and prometheus.monitors is false",
        ),
        ({"drafts": [POOL | {"name": "gateway-demo"}]}, "pool gateway-demo has a name that gateways"),
        ({"kuberay": True, "drafts": [POOL | {"name": "head"}]}, "pool head has a name that"),
        ({"drafts": [POOL | {"settings": {"host": "::"}}]}, "pool d has the setting host, which the chart sets"),
        ({"targets": [POOL]}, "targets/0/serves"),
        ({"drafts": [POOL | {"servedName": "d"}]}, "drafts/0/servedName"),
        (
            {"kuberay": True, "endpointPicker": "p", "targets": [TARGET, TARGET | {"name": "u"}], "drafts": []},
            "endpointPicker is p, and with kuberay the same gateways serve t and u",
        ),
        ({"loadTimeoutSeconds": 95}, "/loadTimeoutSeconds': multipleOf: got 95, want 10"),
        ({"kuberay": True, "loadTimeoutSeconds": 1800}, "loadTimeoutSeconds is 1800, and with kuberay"),
        ({"gateway": {"settings": {"grpc_port": 1}}}, "gateway has the setting grpc_port, which the chart sets"),
    ],
)
def test_values_that_nobody_means_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HelmError, match=words):
        rendered(values)


@pytest.mark.parametrize("setting", sorted({*Pool.model_fields, "model"} - {"name", "role", "worker"}))
def test_what_a_pool_says_is_not_said_again_by_its_settings(setting: str) -> None:
    """The chart's own would win in silence, or the launcher's file would have it."""
    for key, pool in (("targets", TARGET), ("drafts", POOL)):
        with pytest.raises(HelmError, match=f"has the setting {setting}, which the chart sets"):
            rendered({"kuberay": True, "drafts": [], key: [pool | {"settings": {setting: 1}}]})


@pytest.mark.parametrize("kuberay", [False, True])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"drafts": [POOL | {"settings": {"max_slot": 100}}]}, "max_slot.*did you mean .*max_slots"),
        ({"drafts": [], "targets": [TARGET | {"settings": {"lookup_min_n": 3}}]}, "lookup_min_n.* no setting any more"),
        ({"drafts": [POOL | {"settings": {"max_slots": 0}}]}, "max_slots is '?0'?"),
        ({"gateway": {"settings": {"max_runing": 32}}}, "did you mean outrider_gateway_max_running"),
    ],
)
def test_settings_at_which_no_pod_would_start_are_refused(values: dict[str, Any], words: str, kuberay: bool) -> None:
    (said,) = {found for one in rendered(values | {"kuberay": kuberay}) if (found := problem(one)) is not None}
    assert re.search(words, said.lower())


@pytest.mark.parametrize("slots", [None, 20, 22])
def test_a_pool_that_would_never_grow_is_refused(slots: int | None) -> None:
    """All its workers are full before an autoscaler, whose tolerance is a tenth, sees too many answers."""
    for key, pool, cls in (("targets", TARGET, TargetConfig), ("drafts", POOL, DraftConfig)):
        most = {None: 58, 20: 18, 22: 19}[slots]
        assert slots or cls.model_fields["max_slots"].default == 64
        _grows_up_to(most, "max_slots", key, pool | ({} if slots is None else {"settings": {"max_slots": slots}}), {})


@pytest.mark.parametrize(("replicas", "running", "most"), [(1, None, 58), (2, 16, 29), (3, 16, 43)])
def test_a_target_pool_that_its_gateways_would_never_grow_is_refused(
    replicas: int, running: int | None, most: int
) -> None:
    """Each gateway gives each target max_running answers."""
    assert running or GatewayConfig.model_fields["max_running"].default == 64
    pool = TARGET | {"settings": {"max_slots": 65}}
    served = {"replicas": replicas} | ({} if running is None else {"settings": {"max_running": running}})
    _grows_up_to(most, "the gateways' max_running", "targets", pool, {"gateway": served})


def _grows_up_to(most: int, limit: str, key: str, pool: dict[str, Any], more: dict[str, Any]) -> None:
    values = {"prometheus": {"monitors": True}, "drafts": []} | more
    rendered(values | {key: [pool | {"maxReplicas": 4, "answersPerReplica": most}]})
    with pytest.raises(HelmError, match=f"would never grow; say at most {most}, or raise {limit}"):
        rendered(values | {key: [pool | {"maxReplicas": 4, "answersPerReplica": most + 1}]})


def test_a_release_whose_services_would_have_too_long_names_is_refused() -> None:
    rendered({}, "r" * 50)
    with pytest.raises(HelmError, match="r-gateway-demo is longer than the 63 characters"):
        rendered({}, "r" * 51)


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
            *_, kind, address = asked.get("exec", {}).get("command", ("tcp", ":" + min(numbers)))
            assert kind in health.CHECKS
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
    """A gateway does not listen before a target is there: a probe that ended it would keep it from ever serving."""
    limit_s = (values_of(CHART / "values.yaml") | values_of(path))["loadTimeoutSeconds"]
    for labels, each in containers(path.stem):
        if labels["outrider/role"] == "gateway":
            assert not {"startupProbe", "livenessProbe"} & set(each)
        else:
            assert "livenessProbe" in each, labels
        if labels["outrider/role"] in ("target", "draft") and path.stem != "kuberay":
            probe = each["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] == limit_s
    for name, deployment in of_kind(path.stem, "Deployment").items():
        if not name.endswith("-launcher"):
            assert deployment["spec"]["progressDeadlineSeconds"] > limit_s, "kubectl rollout status would give up"


def test_a_rollout_waits_until_gateways_know_the_new_worker() -> None:
    """A name server may answer with the old addresses for 30 s, CoreDNS's default."""
    for name, deployment in of_kind("plain", "Deployment").items():
        waits_s = deployment["spec"].get("minReadySeconds", 0)
        assert (waits_s > 30 + LOOK_S) is ("gateway" not in name)


def test_gateways_find_the_workers_of_their_pools_by_the_services() -> None:
    services = of_kind("plain", "Service")
    deployments = of_kind("plain", "Deployment")
    for pool, drafts, served in (("chat", ["small"], "llama-3b"), ("code", ["small", "copies"], None)):
        membership = from_config(gateway("plain", f"{RELEASE}-gateway-{pool}"))
        assert [one.name for one in membership.pools] == [pool, *drafts]
        assert membership.pools[0].model_name == served
        for member in membership.members:
            host, _, port = member.address.removeprefix(DNS).rpartition(":")
            assert member.address.startswith(DNS)
            assert host == f"{RELEASE}-{member.pool}"
            assert services[host]["spec"]["clusterIP"] == "None", "its name has the addresses of its pods"
            template = deployments[host]["spec"]["template"]
            assert services[host]["spec"]["selector"] == template["metadata"]["labels"]
            assert variables(template["spec"]["containers"][0])[f"OUTRIDER_{member.role.upper()}_PORT"] == port


def test_a_pods_settings_are_those_of_its_pool() -> None:
    read: dict[str, Settings] = {}
    for pool, role in (("chat", "target"), ("code", "target"), ("small", "draft"), ("copies", "draft")):
        found = container("plain", f"{RELEASE}-{pool}")
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
    served = gateway("plain", f"{RELEASE}-gateway-chat")
    assert (served.max_running, served.page, served.drain_timeout_s) == (48, False, 0)


def test_the_pools_of_a_ray_cluster_find_their_nodes() -> None:
    config = launcher()
    assert config.ray is not None
    assert config.ray.name is not None, "a launcher that is started again must take over what runs"
    groups = of_kind("kuberay", "RayCluster")[RELEASE]["spec"]["workerGroupSpecs"]
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
    registry = gateway("kuberay", f"{RELEASE}-gateway").registry
    (port,) = of_kind("kuberay", "Service")[f"{RELEASE}-launcher"]["spec"]["ports"]
    assert registry == f"{RELEASE}-launcher:{port['port']}"
    assert (config.targets[0].model_name, config.targets[0].worker.kv_cache_tokens) == ("llama-3b", 1048576)


@pytest.mark.parametrize("name", WITH_ALL)
def test_a_pod_drains_its_worker_before_it_ends_and_has_the_time(name: str) -> None:
    graces = {
        labels["outrider/pool"]: spec["terminationGracePeriodSeconds"]
        for labels, spec in pods(example(name))
        if labels["outrider/role"] in WORKERS
    }
    assert graces == {"chat": 151, "code": 65, "small": 65, "copies": 65}, "60 s more than it drains"
    if name == "kuberay":
        for group in of_kind(name, "RayCluster")[RELEASE]["spec"]["workerGroupSpecs"]:
            command = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert command == ["python", "-m", node_drain.__name__]


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_gateways_can_be_upgraded_before_any_other_pod(path: Path) -> None:
    values = values_of(path)
    images = values.get("images", {}) | {"gateway": "new"}
    moved = [
        after
        for before, after in zip(example(path.stem), rendered(values | {"images": images}), strict=True)
        if before != after
    ]
    assert moved
    assert {(one["kind"], one["metadata"]["labels"]["outrider/role"]) for one in moved} == {("Deployment", "gateway")}


@pytest.mark.parametrize(("name", "deployment"), [("plain", "gateway-chat"), ("kuberay", "gateway")])
def test_secrets_are_where_the_parts_look(name: str, deployment: str) -> None:
    read = gateway(name, f"{RELEASE}-{deployment}")
    spec = of_kind(name, "Deployment")[f"{RELEASE}-{deployment}"]["spec"]["template"]["spec"]
    assert _secrets(spec) == {
        read.tls_dir: ["outrider-tls-gateway"],
        read.public_tls_dir: ["public"],
        str(read.api_keys).rpartition("/")[0]: ["keys"],
    }
    for labels, pod in pods(example(name)):
        role = labels["outrider/role"]
        if role in WORKERS:
            assert _secrets(pod) == {str(health.TLS_DIR): [f"outrider-tls-{role}", "hub"]}
    if name == "kuberay":
        config = launcher()
        assert config.ray is not None
        assert {config.ray.tls_dir, *(pool.worker.tls_dir for pool in config.pools)} == {str(health.TLS_DIR)}
        pod = of_kind(name, "Deployment")[f"{RELEASE}-launcher"]["spec"]["template"]["spec"]
        assert _secrets(pod) == {str(health.TLS_DIR): ["outrider-tls-launcher"]}


def _secrets(pod: dict[str, Any]) -> dict[str | None, list[str]]:
    """Names of Secrets by where they are mounted."""
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    found: dict[str | None, list[str]] = {}
    for volume in pod["volumes"]:
        if "secret" in volume:
            found[mounts[volume["name"]]] = [volume["secret"]["secretName"]]
        if "projected" in volume:
            found[mounts[volume["name"]]] = [one["secret"]["name"] for one in volume["projected"]["sources"]]
    return found


@pytest.mark.parametrize("name", WITH_ALL)
def test_what_is_served_by_tls_is_named_so(name: str) -> None:
    """To ingresses and meshes, and to Prometheus; workers' metrics are plain."""
    services = {key: one for key, one in of_kind(name, "Service").items() if "gateway" in key}
    assert {port["appProtocol"] for one in services.values() for port in one["spec"]["ports"]} == {"https"}
    (monitor,) = of_kind(name, "ServiceMonitor").values()
    assert {one["scheme"] for one in monitor["spec"]["endpoints"]} == {"https"}
    assert "http://" not in json.dumps(of_kind(name, "ScrapeConfig"))
    services = {key: one for key, one in of_kind("minimal", "Service").items() if "gateway" in key}
    ports = {port["name"]: port["appProtocol"] for one in services.values() for port in one["spec"]["ports"]}
    assert ports == {"http": "http", "grpc": "kubernetes.io/h2c"}


@pytest.mark.parametrize("name", WITH_ALL)
def test_scraped_as_alerts_and_dashboards_ask(name: str) -> None:
    """Jobs by name; workers by the list that a gateway gives, so that a member is called the same in all series."""
    ours = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    (monitor,) = of_kind(name, "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    jobs = {one["replacement"] for one in endpoint["relabelings"] if one["targetLabel"] == "job"}
    (workers,) = of_kind(name, "ScrapeConfig").values()
    assert jobs | {workers["spec"]["jobName"]} == {one["job_name"] for one in ours}
    gateways = {
        key: one for key, one in of_kind(name, "Service").items() if selects(monitor["spec"]["selector"], _labels(one))
    }
    assert gateways.keys() == {key for key in of_kind(name, "Service") if "gateway" in key}
    port = {one["name"]: one["port"] for one in gateways.popitem()[1]["spec"]["ports"]}[endpoint["port"]]
    assert {one["url"] for one in workers["spec"]["httpSDConfigs"]} == {
        f"https://{key}.{NAMESPACE}.svc:{port}/sd" for key in of_kind(name, "Service") if "gateway" in key
    }


def _labels(manifest: Manifest) -> dict[str, str]:
    labels: dict[str, str] = manifest["metadata"]["labels"]
    return labels


def test_keda_sizes_pools_that_no_release_sizes() -> None:
    """What its queries return is asked of a real Prometheus, by tests/e2e/test_keda_queries.py."""
    scaled = of_kind("plain", "ScaledObject")
    assert {name: (one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]) for name, one in scaled.items()} == {
        f"{RELEASE}-chat": (2, 8),
        f"{RELEASE}-small": (1, 4),
    }
    for name, deployment in of_kind("plain", "Deployment").items():
        assert ("replicas" in deployment["spec"]) is (name not in scaled), "an upgrade would undo what KEDA did"
    assert {name: one["spec"]["scaleTargetRef"]["name"] for name, one in scaled.items()} == {
        name: name for name in scaled
    }


def test_an_inference_pool_is_the_gateways_of_one_model() -> None:
    for pool in ("chat", "code"):
        spec = of_kind("plain", "InferencePool")[f"{RELEASE}-gateway-{pool}"]["spec"]
        (found,) = [one for one, _ in pods(example("plain")) if selects(spec["selector"], one)]
        assert (found["outrider/role"], found["outrider/pool"]) == ("gateway", pool)
        ports = container("plain", f"{RELEASE}-gateway-{pool}")["ports"]
        assert spec["targetPorts"] == [{"number": one["containerPort"]} for one in ports if one["name"] == "http"]


def test_the_chart_is_of_the_versions_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version("outrider")
    ray = of_kind("kuberay", "RayCluster")[RELEASE]["spec"]["rayVersion"]
    assert f"ray=={ray}" in (REPO / "constraints.txt").read_text().splitlines()


def test_the_chart_of_a_release_is_that_of_the_folder(tmp_path: Path) -> None:
    pack(CHART, CHART.name, tmp_path / "outrider.tgz", 1_700_000_000)
    for path in EXAMPLES:
        assert complaints(values_of(path), tmp_path / "outrider.tgz") == []
        assert rendered(values_of(path), path=tmp_path / "outrider.tgz") == example(path.stem)


def test_a_machine_without_helm_is_told_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helm_python", None)
    for name in ("chart", "__main__"):
        monkeypatch.delitem(sys.modules, f"tests.kubernetes.{name}")
    with pytest.raises(SystemExit, match="helm-python-sdk has no wheel for this machine; run it where"):
        runpy.run_module("tests.kubernetes", run_name="__main__")


def test_values_that_cannot_be_read_are_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (broken := tmp_path / "broken.yaml").write_text("targets: [{")
    assert main([tmp_path / "missing.yaml", broken]) == 1
    _, missing, unread = capsys.readouterr().out.splitlines()
    assert re.match("REFUSED  missing: values: cannot be read: .*No such file", missing)
    assert re.match("REFUSED  broken: chart: error converting YAML", unread)
