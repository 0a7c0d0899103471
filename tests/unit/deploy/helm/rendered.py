"""The chart, rendered."""

from typing import Any

from outrider.wire.settings.config import GatewayConfig
from tests.kubernetes.chart import Manifest, example
from tests.kubernetes.check import pods, settings

TARGET = {"name": "t", "model": "m", "replicas": 2, "cpu": 1, "memory": "1Gi"}
POOL = TARGET | {"name": "d", "serves": ["demo"]}


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
