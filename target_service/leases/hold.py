"""When a step waits for draft tokens that are on their way.

A step is held while those that are missing are worth more than the tokens that the wait costs. A slot whose request
names how many are verified waits longer by itself, while the others go on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from outrider.engine.worker.jobs import SlotKey
from target_service.leases.lease import DeliveredDrafts, Lease

MAX_HOLD_S = 1.0
"""Seconds that a request which names how many draft tokens are verified waits for them at most."""
_PATIENCE = 2.0
"""Times what draft tokens usually take that a step is held for them."""


class PendingDraft(NamedTuple):
    """A draft with more tokens in flight for a slot."""

    lease: Lease
    draft: DeliveredDrafts
    prob: float
    """Acceptance probability of the next one."""


class ExpectedArrival(NamedTuple):
    """When the next draft tokens of a draft are expected for a slot."""

    until_s: float
    """Monotonic time at which they are overdue."""
    takes_s: float
    """How long they usually take."""
    is_first: bool
    """None are buffered for the slot's next step."""


def expected_arrival(lease: Lease, draft: DeliveredDrafts, now: float) -> ExpectedArrival | None:
    """Return when the next draft tokens should arrive; None where that is unknown, or they are overdue."""
    is_first = lease.length in draft.starved_since_s
    since_s, takes_s = (lease.ready_s, draft.eta_s) if is_first else (draft.arrived_s, draft.gap_s)
    if takes_s is None:
        return None
    until_s = since_s + _PATIENCE * takes_s
    return ExpectedArrival(until_s, takes_s, is_first) if now < until_s else None


def waits_alone(pending: Iterable[PendingDraft], now: float) -> dict[SlotKey, float]:
    """Return the slots whose requests name how many are verified and that still wait for some while others go on, and
    until when each does.
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
    """Record what a step begins without. What is waited for in vain is not waited for again until some arrive.

    awaited: by which the step might have been held; waiting: slots that wait by themselves.
    """
    awaited_tickets = {draft.ticket for _, draft, _ in awaited}
    for lease, draft, _ in pending:
        is_fixed = lease.speculation.is_fixed
        if draft.ticket in awaited_tickets or is_fixed:
            draft.is_active = lease.slot.key in waiting or lease.held_from_s is None
        if not is_fixed and expected_arrival(lease, draft, now) is not None:
            lease.is_passed_over = True


def hold_until(pending: Iterable[PendingDraft], now: float, rate: float) -> float | None:
    """Return until when a step waits for the next tokens of these drafts; None to go at once. rate: tokens a second
    that a wait costs.
    """
    first: ExpectedArrival | None = None
    gain = 0.0
    for lease, draft, prob in pending:
        expected = expected_arrival(lease, draft, now)
        if expected is None:
            continue
        first = expected if first is None else min(first, expected)
        gain += prob
        if not expected.is_first or draft.gap_s is None:
            continue
        # What those after the first would bring, less what waiting for each of them costs.
        for _ in range(lease.max_drafts - 1):
            prob *= draft.shares.share(0)
            if prob <= draft.gap_s * rate:
                break
            gain += prob - draft.gap_s * rate
    if first is None or rate <= 0.0:
        return None
    return first.until_s if gain / rate > first.takes_s else None
