"""Metric series of the gateway's workers. They are computed at each scrape, because workers come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.workers.member import Member, State
from gateway.workers.membership import Membership, MemberSpec

STARTING = "starting"
"""State of a worker that is being started, for the first time or after a loss. The registry does not have its address
yet."""
AWAY = (State.LOST, State.REFUSED, State.FAILING)
"""States of a worker to which the gateway has a link, and which does not serve although it should."""


class MemberSeries(Collector):
    """Prometheus collector of the series of all workers that the gateway knows.

    * `outrider_worker_connected{worker="draft"} == 0`: that draft worker is lost, or is being started.
    * `outrider_worker_lost == 1`: the worker is expected to serve, and does not.
    * `sum by (pool, state) (outrider_members)`: workers by state, of every pool, even of one without workers.
    * `outrider_breaker_open == 1`: the worker is down by its health, and gets no choices.
    * `outrider_member_requests`: number of choices that this gateway has placed on the worker.
    """

    def __init__(self, members: Callable[[], Sequence[Member]], membership: Callable[[], Membership]) -> None:
        """Create the series.

        members: returns the members that have a link. membership: returns the membership; its other members are being
        started.
        """
        self._members = members
        self._membership = membership
        self._expected: set[str] = set()

    def note_change(self) -> None:
        """Update which members are expected to serve.

        Call it whenever a member connects, begins to drain or is lost, and when the membership changes. A member is
        expected once it was listed as ready or has connected, and until it drains or is no longer listed.
        """
        linked = {member.name: member for member in self._members()}
        specs = {spec.name: spec for spec in self._membership().members}
        self._expected &= specs.keys()
        for name, spec in specs.items():
            member = linked.get(name)
            if spec.is_draining or (member is not None and member.is_draining):
                self._expected.discard(name)
            elif not spec.is_starting or (member is not None and member.connection is not None):
                self._expected.add(name)

    def collect(self) -> Iterable[Metric]:
        members = self._members()
        membership = self._membership()
        connected = GaugeMetricFamily(
            "outrider_worker_connected",
            "1 while the stream to the worker is up.",
            labels=["worker", "member", "pool"],
        )
        lost = GaugeMetricFamily(
            "outrider_worker_lost",
            "1 while a worker that should serve does not: it is not being removed, nor is this its first start.",
            labels=["worker", "member", "pool"],
        )
        states = GaugeMetricFamily("outrider_members", "Workers of a pool, by state.", labels=["pool", "role", "state"])
        breakers = GaugeMetricFamily(
            "outrider_breaker_open", "1 while the worker is down by its health, and left alone.", labels=["member"]
        )
        requests = GaugeMetricFamily(
            "outrider_member_requests", "Requests that this gateway has placed there.", labels=["member", "pool"]
        )
        linked = {member.name for member in members}
        starting = [spec for spec in membership.members if spec.name not in linked]
        counts = Counter[tuple[str, str]]()
        for member in members:
            counts[member.spec.pool, member.state.value] += 1
        for spec in starting:
            counts[spec.pool, STARTING] += 1
        state_names = [*(state.value for state in State), STARTING]
        for pool in membership.pools:
            for state_name in state_names:
                states.add_metric([pool.name, pool.role, state_name], counts[pool.name, state_name])
        for spec in starting:
            connected.add_metric(_labels(spec), 0)
            lost.add_metric(_labels(spec), spec.name in self._expected)
        for member in members:
            connected.add_metric(_labels(member.spec), member.connection is not None)
            lost.add_metric(_labels(member.spec), member.name in self._expected and member.state in AWAY)
            breakers.add_metric([member.name], member.health.is_down)
            requests.add_metric([member.name, member.spec.pool], member.num_choices)
        return [connected, lost, states, breakers, requests]


def _labels(spec: MemberSpec) -> list[str]:
    return [spec.role, spec.name, spec.pool]
