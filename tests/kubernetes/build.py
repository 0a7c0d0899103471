"""What `kubectl apply -k` would send, for the part of kustomize that our manifests use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "images", "patches"}


def built(folder: Path) -> list[Manifest]:
    """Raises ValueError where a kustomization holds what is not understood here."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(kustomization) - _KNOWN
    if unknown:
        raise ValueError(f"{folder}/kustomization.yaml: {sorted(unknown)} is not understood by the check; teach it")
    manifests = [one for name in kustomization["resources"] for one in _resources(folder / name)]
    for generator in kustomization.get("configMapGenerator", ()):
        _generate(manifests, generator, folder)
    for patch in kustomization.get("patches", ()):
        _patch(manifests, patch["target"], yaml.safe_load((folder / patch["path"]).read_text()))
    if "namespace" in kustomization:
        for one in manifests:
            if one["kind"] != "Namespace":
                one["metadata"]["namespace"] = kustomization["namespace"]
    return manifests


def documents(path: Path) -> list[Manifest]:
    # Each node of its own: YAML's aliases are one object, and a patch of one place must not change another.
    return [_unshared(one) for one in yaml.safe_load_all(path.read_text()) if one]


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(one) for key, one in value.items()}
    return [_unshared(one) for one in value] if isinstance(value, list) else value


def _resources(path: Path) -> list[Manifest]:
    return built(path) if path.is_dir() else documents(path)


def _generate(manifests: list[Manifest], generator: dict[str, Any], folder: Path) -> None:
    name, data = generator["name"], {file: (folder / file).read_text() for file in generator["files"]}
    if generator.get("behavior") == "replace":
        (replaced,) = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", name)]
        manifests.remove(replaced)
    manifests.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})


def _patch(manifests: list[Manifest], target: dict[str, str], operations: list[dict[str, Any]]) -> None:
    found = [one for one in manifests if one["kind"] == target["kind"] and one["metadata"]["name"] == target["name"]]
    if len(found) != 1:
        raise ValueError(f"patch of {target}: {len(found)} manifests are meant")
    for operation in operations:
        if operation["op"] not in ("add", "replace"):
            raise ValueError(f"patch of {target}: {operation['op']!r} is not understood by the check; teach it")
        *way, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        place: Any = found[0]
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if operation["op"] == "replace":
            _replace(place, last, operation)
        elif isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        else:
            place[last] = operation["value"]


def _replace(place: Any, last: str, operation: dict[str, Any]) -> None:
    key = int(last) if isinstance(place, list) else last
    if isinstance(place, dict) and key not in place:
        raise ValueError(f"patch of {operation['path']}: nothing is there to be replaced")
    place[key] = operation["value"]
