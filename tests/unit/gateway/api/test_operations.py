"""/sd: which workers Prometheus is told of, and where."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.operations import reachable, target_groups
from gateway.workers.membership import MemberSpec
from outrider.v1 import common_pb2 as pb


def member(name: str, *, told: str | None, known: str = "") -> Any:
    """`told`: metrics address of its last info, None while it has never answered. `known`: of the membership."""
    spec = MemberSpec(name, "pool", "target", "10.0.0.7:5000", metrics_address=known)
    return SimpleNamespace(
        spec=spec, link=SimpleNamespace(info=None if told is None else pb.WorkerInfo(metrics_address=told))
    )


def test_every_worker_that_has_metrics_is_listed_with_what_it_is() -> None:
    members = [
        member("a", told="10.0.0.7:9100"),
        member("b", told=None, known="10.0.0.8:9100"),
        member("c", told=""),
        member("d", told=None),
    ]
    assert target_groups(members) == [
        {"targets": ["10.0.0.7:9100"], "labels": {"role": "target", "pool": "pool", "member": "a"}},
        {"targets": ["10.0.0.8:9100"], "labels": {"role": "target", "pool": "pool", "member": "b"}},
    ]


@pytest.mark.parametrize(
    ("metrics", "worker", "expected"),
    [
        ("10.0.0.9:9100", "10.0.0.7:5000", "10.0.0.9:9100"),
        ("0.0.0.0:9100", "draft:5000", "draft:9100"),
        ("[::]:9100", "[fd00::7]:5000", "[fd00::7]:9100"),
    ],
)
def test_a_worker_that_listens_everywhere_is_found_where_its_grpc_is(metrics: str, worker: str, expected: str) -> None:
    assert reachable(metrics, worker) == expected
