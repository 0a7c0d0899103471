"""How long a step waits for draft tokens that are on their way. Called by `step`, through its budget.

A step is held while the tokens that it would gain exceed the tokens that the wait costs. A slot whose request fixes the
number of draft tokens waits by itself, and longer, while the other slots step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from outrider.engine.worker.jobs import SlotKey
from target_service.leases.lease import Lease, SlotDraftWorker

MAX_HOLD_S = 1.0
"""Maximum seconds that a slot waits for draft tokens if its request fixes their number."""
_PATIENCE = 2.0
"""A step is held for draft tokens for at most this multiple of the mean time in which they arrive."""


class PendingDraft(NamedTuple):
    """Draft worker from which more draft tokens may still arrive for a slot's next step."""

    lease: Lease
    draft: SlotDraftWorker
    prob: float
    """Probability that the next draft token that arrives from this draft worker is accepted."""


class ExpectedArrival(NamedTuple):
    """When the next draft tokens of a draft worker are expected for a slot."""

    until_s: float
    """Monotonic time, in seconds, after which these draft tokens are overdue."""
    takes_s: float
    """Mean seconds until these draft tokens arrive: since the slot became ready if they are its first for this step,
    else since the draft worker's previous delivery."""
    is_first: bool
    """Whether the slot has no draft tokens yet for its next step, so that these are the first."""


def expected_arrival(lease: Lease, draft: SlotDraftWorker, now: float) -> ExpectedArrival | None:
    """Return when a draft worker's next draft tokens should arrive for a slot. None if no such arrival was measured, or
    if the tokens are overdue. now: monotonic time, in seconds.
    """
    is_first = lease.length in draft.starved_since_s
    since_s = draft.arrived_s
    takes_s = draft.gap_s
    if is_first:
        since_s = lease.ready_s
        takes_s = draft.eta_s
    if takes_s is None:
        return None
    until_s = since_s + _PATIENCE * takes_s
    if now >= until_s:
        return None
    return ExpectedArrival(until_s, takes_s, is_first)


def waiting_slots(pending: Iterable[PendingDraft], now: float) -> dict[SlotKey, float]:
    """Return the slots that wait for missing draft tokens while other slots step, because their requests fix the number
    of draft tokens. Each has the monotonic time, in seconds, until which it waits.

    pending: draft workers from which draft tokens are missing. now: monotonic time, in seconds.
    """
    waiting = dict[SlotKey, float]()
    for lease, _, _ in pending:
        until_s = lease.ready_s + MAX_HOLD_S
        if lease.speculation.is_fixed and now < until_s:
            waiting[lease.slot.key] = until_s
    return waiting


def note_missing(
    pending: Iterable[PendingDraft], awaited: Iterable[PendingDraft], waiting: Container[SlotKey], now: float
) -> None:
    """Record that a step begins without draft tokens that are still expected. If the step has waited for a draft worker
    in vain, later steps do not wait for that worker until its next delivery.

    pending: draft workers from which draft tokens may still arrive. awaited: result of `VerifyBudget.awaited`, the
    pending draft workers for which steps may wait. waiting: slots that wait while the others step. now: monotonic time,
    in seconds.
    """
    awaited_tickets = set[int]()
    for _, draft, _ in awaited:
        awaited_tickets.add(draft.ticket)
    for lease, draft, _ in pending:
        is_fixed = lease.speculation.is_fixed
        if draft.ticket in awaited_tickets or is_fixed:
            draft.is_active = lease.slot.key in waiting or lease.held_from_s is None
        if not is_fixed and expected_arrival(lease, draft, now) is not None:
            lease.is_passed_over = True


def hold_until(pending: Iterable[PendingDraft], now: float, rate: float) -> float | None:
    """Return the monotonic time, in seconds, until which a step waits for the next draft tokens of these draft workers;
    None if it does not wait.

    now: monotonic time, in seconds. rate: tokens per second that steps commit, which are lost while the step waits.

    Example: two draft workers whose next token is accepted with probability 0.6 and 0.4, the first token takes 4 ms,
    200 tokens a second. Waiting brings 1.0 tokens and costs 0.8, so the step waits. At 300 tokens a second it does not.
    """
    first: ExpectedArrival | None = None
    gain = 0.0
    for lease, draft, prob in pending:
        expected = expected_arrival(lease, draft, now)
        if expected is None:
            continue
        if first is None or expected < first:
            first = expected
        gain += prob
        if not expected.is_first or draft.gap_s is None:
            continue
        # Each token after the first brings its probability, less the cost of waiting for it.
        for _ in range(lease.max_depth - 1):
            prob *= draft.acceptance.prob(0)
            if prob <= draft.gap_s * rate:
                break
            gain += prob - draft.gap_s * rate
    if first is None or rate <= 0.0:
        return None
    if gain / rate <= first.takes_s:
        return None
    return first.until_s
