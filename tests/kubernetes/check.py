"""Manifests against the schemas: Kubernetes' own (kubernetes-validate), and of the CRDs that are in schemas/.

And what they tell a process against its settings, which the process itself would refuse at its start.
"""

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import kubernetes_validate

from deploy.launcher import read_arguments, read_config
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig, load
from outrider.wire.settings.system import SystemConfig
from outrider.wire.settings.variables import process_of
from tests.kubernetes.chart import Manifest

SCHEMAS = Path(__file__).parent / "schemas"
VERSION = "1.33"
"""Of Kubernetes."""
Settings = TargetConfig | DraftConfig | GatewayConfig
PARTS: dict[str, type[Settings]] = {process_of(cls): cls for cls in (TargetConfig, DraftConfig, GatewayConfig)}


@functools.cache
def custom_schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """By (apiVersion, kind)."""
    found = [json.loads(path.read_text()) for path in sorted(SCHEMAS.glob("*.json"))]
    return {(one["apiVersion"], one["kind"]): one["schema"] for one in found}


def problem(manifest: Manifest) -> str | None:
    """What is wrong with it first, with its place, or None. Overlays leave most manifests as they are: asked once."""
    return _problem(json.dumps(manifest, sort_keys=True))


@functools.cache
def _problem(text: str) -> str | None:
    manifest = json.loads(text)
    schema = custom_schemas().get((manifest["apiVersion"], manifest["kind"]))
    try:
        if schema is None:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
        else:
            jsonschema.Draft202012Validator(schema).validate(manifest)
            for template in pod_templates(manifest):
                whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pods"}, "template": template}
                kubernetes_validate.validate(whole, VERSION, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    except jsonschema.ValidationError as error:  # kubernetes_validate's are of this class
        return f"{'.'.join(str(part) for part in error.path)}: {error.message[:300]}"
    twice = next((said for template in pod_templates(manifest) if (said := _named_twice(template["spec"]))), None)
    return twice or _misread(manifest)


def _misread(manifest: Manifest) -> str | None:
    """What a process would say of its settings instead of starting."""
    try:
        if "cluster.yaml" in manifest.get("data", {}):
            launcher_settings(manifest)
        for template in pod_templates(manifest):
            for container in template["spec"]["containers"]:
                if container["name"] in PARTS:
                    settings(container)
    except ConfigError as error:
        return str(error)
    return None


def settings(container: dict[str, Any]) -> Settings:
    """Read a container's as its process does. Raises ConfigError."""
    cls = PARTS[container["name"]]
    with patch.dict(os.environ, variables(container), clear=True):
        return load(cls, [arg for arg in container["args"] if arg.startswith("--")])


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Its environment, with an address for the pod's own."""
    return {one["name"]: one.get("value", "10.0.0.1") for one in container["env"]}


def launcher_settings(config_map: Manifest) -> SystemConfig:
    """Read the launcher's file as the launcher does. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "cluster.yaml").write_text(config_map["data"]["cluster.yaml"])
        return read_config(read_arguments(["--config", str(path)]), StopFlag())


def _named_twice(pod: dict[str, Any]) -> str | None:
    """Lists that an API server keeps by name, which schemas do not say: it refuses a name that comes twice."""
    keys = {"env": "name", "ports": "name", "volumeMounts": "mountPath"}
    places = [("volumes", "name", pod)]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        places += [(field, key, container) for field, key in keys.items()]
    for field, key, owner in places:
        names = [one[key] for one in owner.get(field, ()) if key in one]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            return f"{owner.get('name', 'pod')}: {field} has {twice[0]} twice"
    return None


def pod_templates(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Also those inside a RayCluster."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "RayCluster":
        yield spec["headGroupSpec"]["template"]
        yield from (group["template"] for group in spec["workerGroupSpecs"])
    elif "template" in spec:
        yield spec["template"]


def pods(manifests: list[Manifest]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """(labels, spec) of the pods that the manifests make; KubeRay gives them labels of its own."""
    for manifest in manifests:
        groups = [{}] * 9
        if manifest["kind"] == "RayCluster":
            spec = manifest["spec"]
            groups = [
                {"ray.io/cluster": manifest["metadata"]["name"], **group["labels"]}
                for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
            ]
        for more, template in zip(groups, pod_templates(manifest), strict=False):
            yield {**template["metadata"]["labels"], **more}, template["spec"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """A label selector of Kubernetes, with the operators that ours use."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    among = all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", ())
    )
    return wanted and among
