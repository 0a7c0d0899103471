"""The schema of the chart's values: settings are those of the processes."""

from typing import Any

import pytest

from deploy.chart_schema import SET_BY_CHART, values_schema
from outrider.wire.settings.pools import Pool
from tests.kubernetes.chart import CHART, HelmError, rendered
from tests.unit.deploy.helm.rendered import POOL, TARGET


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kubray": True}, "'kubray' not allowed"),
        ({"drafts": [POOL | {"name": "A b"}]}, "'A b' does not match"),
        ({"gateway": {"settings": {"num_draft_tokens": "many"}}}, "num_draft_tokens': value must be 'auto'"),
        (
            {"drafts": [], "targets": [TARGET | {"gpus": 1, "settings": {"tensor_parallel": 4}}]},
            "pool t has gpus 1, and a worker of it takes 4, one for each rank of tensor_parallel",
        ),
        ({"drafts": [POOL | {"gpus": 2}]}, "pool d has gpus 2, and a worker of it takes 1"),
        (
            {"gateway": {"ingress": {"enabled": True}}},
            "ingress is enabled for prod-outrider-gateway-demo, and names no hosts",
        ),
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
        ({"drafts": [POOL | {"maxReplicas": 1, "answersPerReplica": 4}]}, "pool d has replicas 2, and maxReplicas 1"),
        (
            {"kuberay": True, "drafts": [POOL | {"maxReplicas": 4, "answersPerReplica": 4}]},
            "pool d has answersPerReplica, which is for KEDA, and kuberay is on",
        ),
        (
            {"drafts": [POOL | {"maxReplicas": 4, "answersPerReplica": 4}]},
            "pool d has maxReplicas, and prometheus.monitors is false",
        ),
        ({"drafts": [POOL | {"name": "gateway-demo"}]}, "pool gateway-demo has a name that gateways"),
        ({"targets": [TARGET]}, "there are t. Without drafts of yours the chart's own are there"),
        ({"drafts": [POOL | {"settings": {"host": "::"}}]}, "'host' not allowed"),
        (
            {"kuberay": True, "endpointPicker": "p", "targets": [TARGET, TARGET | {"name": "u"}], "drafts": []},
            "endpointPicker is p, and with kuberay the same gateways serve t and u",
        ),
    ],
)
def test_senseless_values_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HelmError, match=words):
        rendered(values)


def test_settings_equal_the_processes_without_those_that_other_values_set() -> None:
    """With kuberay they stand in the launcher's file, beside what that says of a pool."""
    assert values_schema() == (CHART / "values.schema.json").read_text(), "make chart-schema"
    own = {*Pool.model_fields, "model"} - {"name", "role", "worker"}
    settings: dict[Any, Any] = SET_BY_CHART
    for cls, chosen in settings.items():
        assert chosen <= cls.model_fields.keys()
        assert own.isdisjoint(cls.model_fields.keys() - chosen)
