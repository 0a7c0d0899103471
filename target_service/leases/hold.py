"""How long a step waits for draft tokens that are on their way. Called by `step`, through its budget.

A step is held while the missing draft tokens are expected to bring more tokens than the wait costs. A slot whose
request names how many are verified waits alone and longer, while the others step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from outrider.engine.worker.jobs import SlotKey
from target_service.leases.lease import DeliveredDrafts, Lease

MAX_HOLD_S = 1.0
"""Maximum seconds that a slot waits for draft tokens of which its request names the number."""
_PATIENCE = 2.0
"""Multiple of the mean time of draft tokens for which a step is held for them."""


class PendingDraft(NamedTuple):
    """A draft of which more tokens may arrive for a slot's next step."""

    lease: Lease
    draft: DeliveredDrafts
    prob: float
    """Acceptance probability of its next token."""


class ExpectedArrival(NamedTuple):
    """The time at which a draft's next tokens are expected for a slot."""

    until_s: float
    """Monotonic time at which they are overdue, in seconds."""
    takes_s: float
    """Mean seconds that such tokens take."""
    is_first: bool
    """Whether none are buffered for the slot's next step."""


def expected_arrival(lease: Lease, draft: DeliveredDrafts, now: float) -> ExpectedArrival | None:
    """Return when a draft's next tokens should arrive; None where that is unknown, or they are overdue.

    now: monotonic time, in seconds.
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


def waits_alone(pending: Iterable[PendingDraft], now: float) -> dict[SlotKey, float]:
    """Return the slots that wait alone since their requests name how many are verified, and the time until which each
    waits: monotonic, in seconds.
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
    """Record the draft tokens that a step begins without. A draft that let a step wait becomes inactive.

    awaited: the pending drafts for which the step might have been held. waiting: the slots that wait alone.
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
    """Return the monotonic time until which a step waits for the next tokens of these drafts; None to go at once.

    rate: tokens a second that a wait costs.

    Two drafts with prob 0.6 and 0.4, the first expected within 4 ms, 200 tokens a second: the wait brings 1.0 tokens
    and costs 0.8, so the step waits. At 300 tokens a second it goes.
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
        for _ in range(lease.max_drafts - 1):
            prob *= draft.shares.share(0)
            if prob <= draft.gap_s * rate:
                break
            gain += prob - draft.gap_s * rate
    if first is None or rate <= 0.0:
        return None
    if gain / rate <= first.takes_s:
        return None
    return first.until_s
