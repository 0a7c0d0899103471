"""The schema of the chart's values: settings are those of the processes."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.chart_schema import SET_BY_CHART, values_schema
from outrider.wire.settings.pools import Pool
from tests.kubernetes.chart import (
    CHART,
    HelmError,
    rendered,
)

TARGET = {"name": "t", "model": "m", "replicas": 2, "cpu": 1, "memory": "1Gi"}
POOL = TARGET | {"name": "d", "serves": ["demo"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kubray": True}, "'kubray' not allowed"),
        ({"drafts": [POOL | {"name": "A b"}]}, "'A b' does not match"),
        ({"drafts": [POOL | {"settings": {"max_slot": 4}}]}, "'max_slot' not allowed"),
        ({"drafts": [POOL | {"settings": {"tensor_parallel": 4}}]}, "'tensor_parallel' not allowed"),
        ({"targets": [TARGET | {"settings": {"max_slots": 0}}]}, "max_slots': minimum: got 0, want 1"),
        ({"targets": [TARGET | {"settings": {"dtype": "fp16"}}]}, "dtype': value must be one of 'auto'"),
        ({"targets": [TARGET | {"gateway": {"settings": {"max_runing": 4}}}]}, "'max_runing' not allowed"),
        ({"gateway": {"settings": {"num_draft_tokens": "many"}}}, "num_draft_tokens': value must be 'auto'"),
        ({"targets": [TARGET | {"cpu": "half"}]}, "cpu': 'half' does not match"),
        (
            {"drafts": [], "targets": [TARGET | {"gpus": 1, "settings": {"tensor_parallel": 4}}]},
            "pool t has gpus 1, and a worker of it takes 4, one for each rank of tensor_parallel",
        ),
        ({"drafts": [POOL | {"gpus": 2}]}, "pool d has gpus 2, and a worker of it takes 1"),
        (
            {"kuberay": True, "drafts": [], "targets": [TARGET | {"gateway": {"replicas": 3}}]},
            "pool t has values of its gateways",
        ),
        (
            {"gateway": {"ingress": {"enabled": True}}},
            "ingress is enabled for prod-outrider-gateway-demo, and names no hosts",
        ),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "httpRoute is enabled .* names no parentRefs"),
        (
            {
                "gateway": {"ingress": {"enabled": True, "hosts": [{"host": "a", "paths": []}]}},
                "targets": [TARGET, TARGET | {"name": "u"}],
                "drafts": [],
            },
            "gateway-t and prod-outrider-gateway-u have the same ingress",
        ),
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
        ({"targets": [TARGET, TARGET | {"name": "t-metrics"}], "drafts": []}, "pool t-metrics has a name that"),
        ({"targets": [TARGET]}, "there are t. Without drafts of yours the chart's own are there"),
        ({"kuberay": True, "drafts": [POOL | {"name": "head"}]}, "pool head has a name that"),
        ({"drafts": [POOL | {"settings": {"host": "::"}}]}, "'host' not allowed"),
        ({"targets": [POOL]}, "'serves' not allowed"),
        ({"drafts": [POOL | {"servedName": "d"}]}, "'servedName' not allowed"),
        (
            {"kuberay": True, "endpointPicker": "p", "targets": [TARGET, TARGET | {"name": "u"}], "drafts": []},
            "endpointPicker is p, and with kuberay the same gateways serve t and u",
        ),
        ({"loadTimeoutSeconds": 95}, "/loadTimeoutSeconds': multipleOf: got 95, want 10"),
        ({"kuberay": True, "drafts": [POOL | {"strategy": {"type": "Recreate"}}]}, "pool d has a strategy"),
        ({"kuberay": True, "loadTimeoutSeconds": 1800}, "loadTimeoutSeconds is 1800, and with kuberay"),
        ({"gateway": {"settings": {"grpc_port": 1}}}, "'grpc_port' not allowed"),
    ],
)
def test_values_that_nobody_means_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HelmError, match=words):
        rendered(values)


def test_settings_are_those_of_the_processes_but_for_what_other_values_say() -> None:
    """With kuberay they stand in the launcher's file, beside what that says of a pool."""
    assert values_schema() == (CHART / "values.schema.json").read_text(), "make chart-schema"
    own = {*Pool.model_fields, "model"} - {"name", "role", "worker"}
    for cls, chosen in SET_BY_CHART.items():
        assert chosen <= cls.model_fields.keys()
        assert own.isdisjoint(cls.model_fields.keys() - chosen)
