"""`python -m deploy.chart_schema`: prints values.schema.json of the Helm chart.

The settings of gateways and workers come from their own classes, so that `helm install` refuses a mistyped one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig

Schema = dict[str, Any]

KEPT = ("type", "enum", "const", "anyOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
"""Keywords of JSON Schema that the chart's schema of a setting copies from pydantic's schema of that setting."""
IN_ALL = {"port", "tls_dir", "metrics_port"}
"""Names of the settings that the chart itself sets in every process."""
SET_BY_CHART = {
    GatewayConfig: {
        *IN_ALL,
        "grpc_port",
        "target",
        "draft",
        "target_for_draft",
        "registry",
        "model_name",
        "public_tls_dir",
        "api_keys",
    },
    TargetConfig: {*IN_ALL, "host", "model"},
    DraftConfig: {*IN_ALL, "host", "model"},
}
"""By config class of a process: names of the settings that the chart itself sets. Users cannot set them in the chart's
values."""
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 1}
MAP: Schema = {"type": "object"}
"""Schema that accepts any object. Kubernetes checks the contents of such objects."""
LIST: Schema = {"type": "array", "items": MAP}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
NAME: Schema = {"type": "string", "maxLength": 40, "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$"}
CPU_TEXT: Schema = {"type": "string", "pattern": "^([1-9][0-9]*m?|[0-9]+\\.[0-9]+)$"}
CPU: Schema = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, CPU_TEXT]}


def closed(properties: Schema, *required: str) -> Schema:
    """Return the JSON Schema of an object that may have these properties and no others.

    required: names of the properties that the object must have.
    """
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def settings_of(cls: type[GatewayConfig | DraftConfig | TargetConfig]) -> Schema:
    """Return the JSON Schema of the settings in `cls`, without those that the Helm chart itself sets."""
    settings = cls.model_json_schema()["properties"]
    names = sorted(settings.keys() - SET_BY_CHART[cls])
    return closed({name: _setting(settings[name]) for name in names})


def _setting(schema: Schema) -> Schema:
    # {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 1}: {"type": "integer"}
    kept = {key: value for key, value in schema.items() if key in KEPT}
    if "anyOf" not in kept:
        return kept
    choices: list[Schema] = [choice for choice in kept["anyOf"] if choice != {"type": "null"}]  # null: left out
    if len(choices) == 1:
        return choices[0]
    return {"anyOf": choices}


POD: Schema = {
    "image": closed({"repository": TEXT, "tag": TEXT, "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]}}),
    "imagePullSecrets": LIST,
    "podAnnotations": TEXTS,
    "podLabels": TEXTS,
    "podSecurityContext": MAP,
    "securityContext": MAP,
    "priorityClassName": TEXT,
    "runtimeClassName": TEXT,
    "nodeSelector": TEXTS,
    "tolerations": LIST,
    "affinity": MAP,
    "topologySpreadConstraints": LIST,
    "extraEnv": LIST,
    "volumes": LIST,
    "volumeMounts": LIST,
}
PROBES: Schema = {"livenessProbe": MAP, "readinessProbe": MAP, "startupProbe": MAP}
CACHE: Schema = {
    "gpuResource": {"type": "string", "pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
    "workersPerGpu": COUNT,
    "cache": closed({"size": QUANTITY, "existingClaim": TEXT}),
}
POOL: Schema = {
    **POD,
    **PROBES,
    **CACHE,
    "name": NAME,
    "model": {"type": "string", "minLength": 1},
    "replicas": COUNT,
    "maxReplicas": COUNT,
    "answersPerReplica": {"type": "number", "exclusiveMinimum": 0},
    "cpu": CPU,
    "memory": QUANTITY,
    "gpus": COUNT,
    "resources": MAP,
    "strategy": MAP,
}
GATEWAY: Schema = {
    **POD,
    **PROBES,
    "replicas": COUNT,
    "settings": settings_of(GatewayConfig),
    "resources": MAP,
    "strategy": MAP,
    "autoscaling": closed(
        {"enabled": FLAG, "minReplicas": COUNT, "maxReplicas": COUNT, "targetCPUUtilizationPercentage": COUNT}
    ),
    "service": closed({"type": TEXT, "port": COUNT, "grpcPort": COUNT, "annotations": TEXTS}),
    "ingress": closed(
        {
            "enabled": FLAG,
            "className": TEXT,
            "annotations": TEXTS,
            "hosts": {
                "type": "array",
                "items": closed(
                    {
                        "host": TEXT,
                        "paths": {
                            "type": "array",
                            "items": closed({"path": TEXT, "pathType": TEXT}, "path", "pathType"),
                        },
                    },
                    "host",
                    "paths",
                ),
            },
            "tls": LIST,
        }
    ),
    "httpRoute": closed(
        {
            "enabled": FLAG,
            "annotations": TEXTS,
            "parentRefs": LIST,
            "hostnames": {"type": "array", "items": TEXT},
            "rules": LIST,
        }
    ),
}
NEEDED = ("name", "replicas", "cpu", "memory")
"""Names of the Helm values that every pool must have."""
TARGET: Schema = {
    **POOL,
    "servedName": {"type": "string", "minLength": 1},
    "settings": settings_of(TargetConfig),
    "gateway": {"$ref": "#/properties/gateway"},
}
DRAFT: Schema = {
    **POOL,
    "serves": {"type": "array", "minItems": 1, "items": NAME},
    "settings": settings_of(DraftConfig),
}
OF_A_PARENT: Schema = {"global": {}, "enabled": FLAG}
"""Schemas of values that Helm adds if this chart is a dependency of another one: `global`, and `enabled`, which the
other chart's `condition` names. No template of this chart uses them."""
VALUES: Schema = {
    **OF_A_PARENT,
    "nameOverride": TEXT,
    "fullnameOverride": TEXT,
    **POD,
    **CACHE,
    "serviceAccount": closed({"create": FLAG, "automount": FLAG, "annotations": TEXTS, "name": TEXT}),
    "kuberay": FLAG,
    "targets": {"type": "array", "minItems": 1, "items": closed(TARGET, *NEEDED, "model")},
    "drafts": {"type": "array", "items": closed(DRAFT, *NEEDED, "serves")},
    "modelsClaim": TEXT,
    "loadTimeoutSeconds": {"type": "integer", "minimum": 10, "multipleOf": 10},
    "gateway": closed(GATEWAY),
    "launcher": closed({**POD, "resources": MAP}),
    "head": closed({**POD, "resources": MAP}),
    "secrets": closed(dict.fromkeys(("apiKeys", "tls", "publicTls", "hubToken"), TEXT)),
    "prometheus": closed(
        {
            "monitors": FLAG,
            "rules": FLAG,
            "labels": TEXTS,
            "namespace": TEXT,
            "address": {"type": "string", "pattern": "^https?://"},
        }
    ),
    "grafana": closed({"dashboards": FLAG, "labels": TEXTS, "annotations": TEXTS}),
    "endpointPicker": TEXT,
}


def values_schema() -> str:
    """Return the text of values.schema.json. It uses draft 7 of JSON Schema, the newest version that every Helm 3
    understands.
    """
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **closed(VALUES)}, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(values_schema())
