"""Series of the gateway's workers, worked out when they are read: they come and go with the membership."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.member import Member, State


class MemberSeries(Collector):
    """`outrider_worker_connected{worker="draft"} == 0`: that draft is gone.
    `sum by (pool, state) (outrider_members)`: members by state; those being started are the launcher's alone.
    `outrider_breaker_open == 1`: the member failed several times in a row and is left alone.
    `outrider_member_requests`: requests placed there by this gateway.
    """

    def __init__(self, members: Callable[[], Sequence[Member]]) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        members = self._members()
        connected = GaugeMetricFamily(
            "outrider_worker_connected",
            "1 while the stream to the worker is up.",
            labels=["worker", "member", "pool"],
        )
        states = GaugeMetricFamily("outrider_members", "Workers of a pool, by state.", labels=["pool", "role", "state"])
        breakers = GaugeMetricFamily(
            "outrider_breaker_open", "1 while the worker is left alone because it failed.", labels=["member"]
        )
        requests = GaugeMetricFamily(
            "outrider_member_requests", "Requests that this gateway has placed there.", labels=["member"]
        )
        counts = Counter((member.spec.pool, member.spec.role, member.state) for member in members)
        for pool, role in sorted({(member.spec.pool, member.spec.role) for member in members}):
            for state in State:
                states.add_metric([pool, role, state.value], counts[pool, role, state])
        for member in members:
            connected.add_metric([member.spec.role, member.name, member.spec.pool], member.connection is not None)
            breakers.add_metric([member.name], member.breaker.is_open)
            requests.add_metric([member.name], member.num_requests)
        return [connected, states, breakers, requests]
