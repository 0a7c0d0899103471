"""Series of the gateway's workers, worked out when they are read: they come and go with the membership."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.member import Member, State
from gateway.membership import Membership

STARTING = "starting"
"""State of a member that the registry has no address of yet: for the first time, or again after a loss."""


class MemberSeries(Collector):
    """`outrider_worker_connected{worker="draft"} == 0`: that draft is gone.
    `sum by (pool, state) (outrider_members)`: members by state, of every pool, whether it has any or not.
    `outrider_breaker_open == 1`: the member failed several times in a row and is left alone.
    `outrider_member_requests`: requests placed there by this gateway.
    """

    def __init__(self, members: Callable[[], Sequence[Member]], membership: Callable[[], Membership]) -> None:
        """`members`: those that there are links to; the others of `membership` are being started."""
        self._members = members
        self._membership = membership

    def collect(self) -> Iterable[Metric]:
        members, membership = self._members(), self._membership()
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
            "outrider_member_requests", "Requests that this gateway has placed there.", labels=["member", "pool"]
        )
        linked = {member.name for member in members}
        counts = Counter((member.spec.pool, member.state.value) for member in members)
        counts.update((spec.pool, STARTING) for spec in membership.members if spec.name not in linked)
        for pool in membership.pools:
            for state in (*(state.value for state in State), STARTING):
                states.add_metric([pool.name, pool.role, state], counts[pool.name, state])
        for member in members:
            connected.add_metric([member.spec.role, member.name, member.spec.pool], member.connection is not None)
            breakers.add_metric([member.name], member.breaker.is_open)
            requests.add_metric([member.name, member.spec.pool], member.num_requests)
        return [connected, states, breakers, requests]
