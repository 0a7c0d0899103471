"""The Helm chart: its manifests fit the schemas and each other, and say to each part what the part understands."""

import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import node_drain
from deploy.docker import container_health
from gateway.workers.membership import DNS, from_config
from gateway.workers.named_workers import LOOK_S
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig
from outrider.wire.settings.system import SystemConfig
from outrider.wire.transport import tls
from tests.forked import REPO
from tests.kubernetes.chart import (
    CHART,
    EXAMPLES,
    FULLNAME,
    NAMESPACE,
    RELEASE,
    HelmError,
    Manifest,
    complaints,
    example,
    rendered,
    values_of,
)
from tests.kubernetes.check import (
    Settings,
    launcher_settings,
    pod_templates,
    pods,
    problem,
    selects,
    settings,
    variables,
)
from tests.unit.deploy.helm.rendered import POOL, TARGET, container, containers, gateway, of_kind

NAMES = [path.stem for path in EXAMPLES]
VALUES = {path.stem: values_of(path) for path in EXAMPLES}
WORKERS = ("target", "draft")
WITH_ALL = ("plain", "kuberay")


def launcher() -> SystemConfig:
    return launcher_settings(of_kind("kuberay", "ConfigMap")[f"{FULLNAME}-cluster"])


def _grows_up_to(most: int, limit: str, key: str, pool: dict[str, Any], more: dict[str, Any]) -> None:
    values = {"prometheus": {"monitors": True}, "drafts": []} | more
    rendered(values | {key: [pool | {"maxReplicas": 4, "answersPerReplica": most}]})
    with pytest.raises(HelmError, match=f"would never grow; say at most {most}, or raise {limit}"):
        rendered(values | {key: [pool | {"maxReplicas": 4, "answersPerReplica": most + 1}]})


def _labels(manifest: Manifest) -> dict[str, str]:
    labels: dict[str, str] = manifest["metadata"]["labels"]
    return labels


@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_fits_its_schema(name: str) -> None:
    for manifest in example(name):
        assert problem(manifest) is None, manifest["metadata"]["name"]


@pytest.mark.parametrize("name", [*WITH_ALL, "monitored"])
def test_the_linter_has_no_complaint(name: str) -> None:
    assert complaints(VALUES[name]) == []


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


def test_a_release_whose_services_would_have_too_long_names_is_refused() -> None:
    rendered({}, "r" * 33)
    with pytest.raises(HelmError, match="r-outrider-gateway-demo-metrics is longer than the 63 characters"):
        rendered({}, "r" * 34)


@pytest.mark.parametrize("kuberay", [False, True])
def test_a_name_that_yaml_takes_for_a_number_is_text(kuberay: bool) -> None:
    pools = {"targets": [TARGET | {"name": "70"}], "drafts": [POOL | {"name": "1e3", "serves": ["70"]}]}
    for manifest in rendered(pools | {"kuberay": kuberay, "nameOverride": "8"}, "true"):
        assert problem(manifest) is None, manifest["metadata"]["name"]


def test_a_parents_condition_and_an_empty_list_are_taken() -> None:
    """A chart that has this one as a dependency hands `enabled` down, and `drafts:` without a value is null."""
    assert rendered({"enabled": True, "drafts": None}) == rendered({"drafts": []})


def test_a_copy_of_the_chart_without_its_links_is_refused(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "outrider", ignore=shutil.ignore_patterns("files"))
    assert rendered({}, path=tmp_path / "outrider") == example("minimal")
    with pytest.raises(HelmError, match="has no files/: those are links of the repository"):
        rendered(VALUES["monitored"], path=tmp_path / "outrider")


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
def test_no_pod_is_ended_while_models_are_loaded(path: Path) -> None:
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


def test_a_rollout_waits_until_gateways_have_the_new_worker() -> None:
    """A name server may answer with the old addresses for 30 s, CoreDNS's default."""
    for name, deployment in of_kind("plain", "Deployment").items():
        waits_s = deployment["spec"].get("minReadySeconds", 0)
        assert (waits_s > 30 + LOOK_S) is ("gateway" not in name)


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


def test_a_pod_has_the_settings_of_its_pool() -> None:
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
    assert (config.target_pools[0].model_name, config.target_pools[0].worker.kv_cache_tokens) == ("llama-3b", 1048576)


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


@pytest.mark.parametrize("name", WITH_ALL)
def test_scrape_labels_match_alerts_and_dashboards(name: str) -> None:
    """Jobs by name; workers by the list that a gateway gives, so that a member is called the same in all series."""
    ours = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    (monitor,) = of_kind(name, "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    jobs = {one["replacement"] for one in endpoint["relabelings"] if one["targetLabel"] == "job"}
    (workers,) = of_kind(name, "ScrapeConfig").values()
    assert jobs | {workers["spec"]["jobName"]} == {one["job_name"] for one in ours}
    services = {
        key: {port["name"]: port["port"] for port in one["spec"]["ports"]}
        for key, one in of_kind(name, "Service").items()
        if selects(monitor["spec"]["selector"], _labels(one))
    }
    scraped = {key: ports[endpoint["port"]] for key, ports in services.items() if endpoint["port"] in ports}
    assert {f"{key}-metrics" for key, ports in services.items() if "http" in ports} == scraped.keys()
    urls = {one["url"] for one in workers["spec"]["httpSDConfigs"]}
    assert urls == {f"http://{key}.{NAMESPACE}.svc:{port}/sd" for key, port in scraped.items()}


@pytest.mark.parametrize("name", WITH_ALL)
def test_what_is_served_by_tls_is_named_so(name: str) -> None:
    """To ingresses and meshes; metrics are plain."""
    for example_name, protocols in ((name, {"https"}), ("minimal", {"http", "kubernetes.io/h2c"})):
        services = of_kind(example_name, "Service").values()
        ports = [port for one in services for port in one["spec"]["ports"] if "appProtocol" in port]
        assert {port["appProtocol"] for port in ports if port["name"] != "metrics"} == protocols
        assert {port["appProtocol"] for port in ports if port["name"] == "metrics"} == {"http"}


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


@pytest.mark.parametrize("kuberay", [False, True])
def test_values_of_a_part_override_the_values_of_all_pods(kuberay: bool) -> None:
    everywhere = {
        "podLabels": {"team": "search"},
        "podAnnotations": {"a": "all", "b": "all"},
        "nodeSelector": {"zone": "all"},
        "tolerations": [{"key": "all", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "priorityClassName": "all",
        "runtimeClassName": "all",
        "extraEnv": [{"name": "ALL", "value": "1"}],
        "volumes": [{"name": "all", "emptyDir": {}}],
        "volumeMounts": [{"name": "all", "mountPath": "/all"}],
        "imagePullSecrets": [{"name": "all"}],
        "image": {"tag": "all"},
    }
    own = {
        "podAnnotations": {"b": "own"},
        "priorityClassName": "own",
        "nodeSelector": {"gpu": "own"},
        "tolerations": [],
    }
    values = everywhere | {"kuberay": kuberay, "drafts": [POOL | own | {"serves": ["t"]}], "targets": [TARGET | own]}
    manifests = rendered(values | {"gateway": own, "launcher": own, "head": own})
    assert [problem(one) for one in manifests if problem(one)] == []
    found = list(pods(manifests))
    assert len(found) == (5 if kuberay else 3)
    for template in (template for one in manifests for template in pod_templates(one)):
        assert template["metadata"]["labels"]["team"] == "search"
        assert template["metadata"]["annotations"].items() >= {"a": "all", "b": "own"}.items()
    for labels, spec in found:
        (container,) = spec["containers"]
        assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("own", "all")
        assert spec["nodeSelector"] == {"zone": "all", "gpu": "own"}
        assert "tolerations" not in spec
        assert spec["imagePullSecrets"] == everywhere["imagePullSecrets"]
        assert spec["affinity"] == everywhere["affinity"]
        (spread,) = spec["topologySpreadConstraints"]
        assert spread["maxSkew"] == 2 and selects(spread["labelSelector"], labels)
        assert container["image"].endswith(":all")
        assert {"name": "ALL", "value": "1"} in container["env"]
        assert {"name": "all", "mountPath": "/all"} in container["volumeMounts"]
        assert {"name": "all", "emptyDir": {}} in spec["volumes"]


def test_an_inference_pool_is_the_gateways_of_one_model() -> None:
    for pool in ("chat", "code"):
        spec = of_kind("plain", "InferencePool")[f"{FULLNAME}-gateway-{pool}"]["spec"]
        (found,) = [one for one, _ in pods(example("plain")) if selects(spec["selector"], one)]
        assert (found["app.kubernetes.io/component"], found["outrider/pool"]) == ("gateway", pool)
        ports = container("plain", f"{FULLNAME}-gateway-{pool}")["ports"]
        assert spec["targetPorts"] == [{"number": one["containerPort"]} for one in ports if one["name"] == "http"]


def test_the_chart_is_of_the_versions_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version("outrider")
    ray = of_kind("kuberay", "RayCluster")[FULLNAME]["spec"]["rayVersion"]
    assert f"ray=={ray}" in (REPO / "constraints.txt").read_text().splitlines()


def test_the_chart_of_a_release_is_that_of_the_folder(tmp_path: Path) -> None:
    """As deploy/release.sh packs it where there is no Helm."""
    tar = re.search(r"tar -c [^|]*", (REPO / "deploy/release.sh").read_text())
    assert tar is not None
    packs = f'tree=. SOURCE_DATE_EPOCH=1700000000; {tar[0]} | gzip -n >"$1"'
    subprocess.run(["/bin/sh", "-c", packs, "sh", tmp_path / "outrider.tgz"], cwd=REPO, check=True)
    assert complaints(VALUES["monitored"], tmp_path / "outrider.tgz") == []
    assert rendered(VALUES["monitored"], path=tmp_path / "outrider.tgz") == example("monitored")


def test_the_values_in_the_docs_can_be_installed() -> None:
    text = (REPO / "docs/deploy.md").read_text()
    text = text[text.index("## Kubernetes") : text.index("### KubeRay")]
    shown = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    whole = [values for values in shown if "..." not in str(values)]
    assert len(whole) == 3
    for values in whole:
        for manifest in rendered(values):
            assert problem(manifest) is None, manifest["metadata"]["name"]


def test_rules_and_dashboards_equal_the_folders() -> None:
    (rule,) = of_kind("monitored", "PrometheusRule").values()
    files = sorted((REPO / "deploy/prometheus/rules").glob("*.yml"))
    assert rule["spec"]["groups"] == [one for file in files for one in yaml.safe_load(file.read_text())["groups"]]
    (boards,) = of_kind("monitored", "ConfigMap").values()
    files = sorted((REPO / "deploy/grafana/dashboards").glob("*.json"))
    assert boards["data"] == {f"outrider-{file.name}": file.read_text() for file in files}
    assert boards["metadata"]["labels"].items() >= {("grafana_dashboard", "1")}
    for kind in ("PrometheusRule", "ServiceMonitor", "ScrapeConfig"):
        (found,) = of_kind("monitored", kind).values()
        assert found["metadata"]["labels"].items() >= {("release", "kube-prometheus-stack")}


def test_replicas_are_spread_over_nodes_unless_values_set_it() -> None:
    for name in WITH_ALL:
        for labels, spec in pods(example(name)):
            (spread,) = spec["topologySpreadConstraints"]
            assert spread["topologyKey"] == "kubernetes.io/hostname" and selects(spread["labelSelector"], labels)


def test_a_worker_gets_what_its_pool_names() -> None:
    def resources(name: str, pool: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = container(name, f"{FULLNAME}-{pool}")["resources"]
        return found

    chat = resources("tainted-gpus", "chat")
    assert chat["limits"] == {"cpu": "7500m", "memory": "32Gi", "nvidia.com/gpu": 1}
    assert chat["requests"] == chat["limits"] | {"ephemeral-storage": "50Gi"}
    assert resources("mig", "small")["limits"]["nvidia.com/mig-1g.10gb"] == 1
    assert resources("mig", "code")["limits"]["amd.com/gpu"] == 2
    (spec,) = [
        spec for labels, spec in pods(example("mig")) if labels.get("outrider/pool") == "code" and "gpu" in str(spec)
    ]
    assert spec["tolerations"] == [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "ephemeral-storage" not in resources("cache-claim", "chat")["requests"], "the cache is no part of the node"
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for labels, spec in pods(example("cache-claim"))
        for volume in spec["volumes"]
        if volume["name"] == "cache"
    ]
    assert sorted(claims) == ["cache-chat", "cache-small"]
    merged = rendered({"drafts": [], "targets": [TARGET | {"resources": {"limits": {"cpu": 4}}}]})
    (limits,) = [
        one["resources"]["limits"] for _, spec in pods(merged) for one in spec["containers"] if one["name"] == "target"
    ]
    assert limits == {"cpu": 4, "memory": "1Gi"}


def test_half_a_cpu_is_a_whole_one_of_ray() -> None:
    values = {
        "kuberay": True,
        "targets": [TARGET | {"cpu": "1500m"}],
        "drafts": [POOL | {"cpu": "0.5", "serves": ["t"]}],
    }
    manifests = rendered(values)
    (cluster,) = [one for one in manifests if one["kind"] == "RayCluster"]
    groups = {group["groupName"]: group["resources"]["CPU"] for group in cluster["spec"]["workerGroupSpecs"]}
    assert groups == {"t": "2", "d": "1"}
    (config,) = [launcher_settings(one) for one in manifests if one["kind"] == "ConfigMap"]
    assert {pool.name: pool.num_cpus for pool in config.pools} == {"t": 2, "d": 1}


def test_a_target_pool_may_have_gateways_of_its_own_making() -> None:
    deployments = of_kind("http-routes", "Deployment")
    replicas = [deployments[f"{FULLNAME}-gateway-{pool}"]["spec"]["replicas"] for pool in ("chat", "code")]
    assert replicas == [3, 2]
    limits = [gateway("http-routes", f"{FULLNAME}-gateway-{pool}").max_running for pool in ("chat", "code")]
    assert limits == [32, 64]
    for pool in ("chat", "code"):
        spec = of_kind("http-routes", "HTTPRoute")[f"{FULLNAME}-gateway-{pool}"]["spec"]
        assert spec["hostnames"] == [f"{pool}.example.com"]
        assert spec["rules"][0]["backendRefs"] == [{"name": f"{FULLNAME}-gateway-{pool}", "port": 8000}]
    (scaled,) = of_kind("autoscaling", "HorizontalPodAutoscaler").values()
    assert "replicas" not in of_kind("autoscaling", "Deployment")[scaled["spec"]["scaleTargetRef"]["name"]]["spec"]


def test_the_metrics_of_gateways_are_for_prometheus_alone() -> None:
    (policy,) = [one for name, one in of_kind("monitored", "NetworkPolicy").items() if name.endswith("-gateways")]
    users, prometheus = policy["spec"]["ingress"]
    assert "from" not in users and {port["port"] for port in users["ports"]} == {"http", "grpc"}
    assert {port["port"] for port in prometheus["ports"]} == {"metrics"}
    (source,) = prometheus["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    assert gateway("monitored", f"{FULLNAME}-gateway-demo").metrics_port == 9000


@pytest.mark.parametrize("name", ["plain", "kuberay", "monitored", "ingress", "autoscaling"])
def test_every_object_has_the_standard_labels(name: str) -> None:
    standard = {
        "app.kubernetes.io/name": "outrider",
        "app.kubernetes.io/instance": RELEASE,
        "app.kubernetes.io/version": version("outrider"),
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": f"outrider-{version('outrider')}",
    }
    for manifest in example(name):
        assert manifest["metadata"]["labels"].items() >= standard.items(), manifest["metadata"]["name"]


def test_images_have_the_charts_version_unless_values_set_another() -> None:
    images = {one["image"] for _, one in containers("minimal")}
    assert images == {f"outrider-{part}:{version('outrider')}" for part in ("gateway", "worker")}
