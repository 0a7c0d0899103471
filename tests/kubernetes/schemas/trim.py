"""`python tests/kubernetes/schemas/trim.py CRD.yaml ORIGIN [FIELD...] > KIND.json`: what a resource of a CRD may hold.

Kept: the storage version's openAPIV3Schema, without descriptions, unknown fields refused (as `kubectl apply` does with
strict validation). A pod template inside becomes "any object": it is checked as Kubernetes' own PodTemplate. With
fields named, those alone are kept of the spec's.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml


def trimmed(crd: dict[str, Any], origin: str, fields: list[str]) -> dict[str, Any]:
    """A JSON schema; origin is where the CRD is from, with its version. No fields: all of the spec's."""
    version = next(one for one in crd["spec"]["versions"] if one["storage"])
    schema = _closed(version["schema"]["openAPIV3Schema"])
    if fields:
        spec = schema["properties"]["spec"]
        spec["properties"] = {name: spec["properties"][name] for name in fields}
    schema["properties"] |= {name: {} for name in ("apiVersion", "kind", "metadata", "status")}
    return {
        "$comment": f"From {origin}, Apache-2.0; trimmed by trim.py.",
        "apiVersion": f"{crd['spec']['group']}/{version['name']}",
        "kind": crd["spec"]["names"]["kind"],
        "schema": schema,
    }


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {
        key: {name: _closed(one) for name, one in value.items()} if key == "properties" else _closed(value)
        for key, value in schema.items()
        if key not in ("description", "default", "example") and not key.startswith("x-kubernetes")
    }
    if "properties" in kept:
        kept.setdefault("additionalProperties", False)
        if "template" in kept["properties"] and "containers" in json.dumps(kept["properties"]["template"]):
            kept["properties"]["template"] = {"type": "object"}
    return kept


if __name__ == "__main__":
    crd = yaml.safe_load(Path(sys.argv[1]).read_text())
    sys.stdout.write(json.dumps(trimmed(crd, sys.argv[2], sys.argv[3:]), sort_keys=True) + "\n")
