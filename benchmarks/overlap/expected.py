"""What the simulation says of a group's arms, fed with what the group measured."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.overlap import simulation
from benchmarks.overlap.costs import Costs
from benchmarks.overlap.results import (
    CHAIN,
    OVERLAP_TREE,
    OVERLAPPED,
    PLAIN,
    PLAIN_LEASE,
    PLAIN_TODAY,
    TODAY,
    TREE,
    Cell,
    GroupResult,
)
from benchmarks.overlap.simulation import Estimate
from benchmarks.overlap.traces import Traces


def service_costs(result: GroupResult) -> Costs:
    """Return the costs with what plain decoding shows of services: a target's step in one beside a bare one, and beside
    it the round before, which waits for its gateway.
    """
    plain, lease, today = (result.cell(*each) for each in ((PLAIN, None), (PLAIN_LEASE, 0.0), (PLAIN_TODAY, 0.0)))
    if plain is None or lease is None or today is None:
        return result.costs
    return replace(
        result.costs,
        target_service_s=max(0.0, lease.step_s - plain.step_s),
        gateway_s=max(0.0, today.step_s - lease.step_s),
    )


def target_service_s(result: GroupResult, cell: Cell) -> float:
    """Return what a step of the target took more in its service, from when it could begin, than it should by its mean
    number of rows: messages that are read on its core, and memory that the draft reads at the same time, are in it.
    """
    return max(0.0, cell.total("verify") / cell.total("num_steps") - result.costs.verify_s(cell.target_rows))


def draft_service_s(result: GroupResult, cell: Cell) -> float:
    """Return what a step of the draft took more in its service than it should, by its mean number of rows: the longer
    of the step itself and of all that its process computed, messages included.
    """
    num_steps = cell.total("draft_steps")
    if not num_steps:
        return 0.0
    took_s = max(cell.total("draft_busy"), cell.total("draft_cpu")) / num_steps
    return max(0.0, took_s - result.costs.draft_s(round(cell.draft_rows)))


def estimate(result: GroupResult, traces: Traces, cell: Cell) -> Estimate | None:
    """Return what an arm should make; None where that is not simulated."""
    if cell.arm == PLAIN:
        return simulation.chain(traces, result.costs, 0)
    if cell.arm == CHAIN:
        return simulation.chain(traces, result.costs, result.tuned.chain)
    if cell.arm == TREE and result.tuned.tree is not None:
        return simulation.tree(traces, result.costs, result.tuned.tree)
    if cell.round_trip is None or cell.arm not in (TODAY, *OVERLAPPED):
        return None
    costs = replace(
        service_costs(result),
        target_service_s=target_service_s(result, cell),
        draft_service_s=draft_service_s(result, cell),
        round_trip_s=result.round_trips_s[cell.round_trip],
    )
    if cell.arm == TODAY:
        return simulation.chain(traces, costs, result.tuned.today[cell.round_trip], services=True)
    return simulation.overlap(traces, costs, trees=cell.arm == OVERLAP_TREE)
