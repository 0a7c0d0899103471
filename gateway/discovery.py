"""Where Prometheus finds the workers: the body of /sd, in the form of its HTTP service discovery."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from gateway.member import Member
from outrider.wire.address import join_host_port

EVERYWHERE = ("0.0.0.0", "[::]")
"""Where a worker listens that was told no host: nothing that anybody could connect to."""


class TargetGroup(TypedDict):
    targets: list[str]
    labels: dict[str, str]


def target_groups(members: Iterable[Member]) -> list[TargetGroup]:
    """Of all that have said where their metrics are, whether they are connected now or not."""
    groups: list[TargetGroup] = []
    for member in members:
        spec, info = member.spec, member.link.info
        address = spec.metrics_address or ("" if info is None else info.metrics_address)
        if address:
            labels = {"role": spec.role, "pool": spec.pool, "member": spec.name}
            groups.append({"targets": [reachable(address, spec.address)], "labels": labels})
    return groups


def reachable(metrics_address: str, worker_address: str) -> str:
    """A worker that listens on every address is asked for its metrics where its gRPC is."""
    host, _, port = metrics_address.rpartition(":")
    if host not in EVERYWHERE:
        return metrics_address
    return join_host_port(worker_address.rpartition(":")[0].strip("[]"), int(port))
