"""Which draft worker drafts for a choice: chooses it, keeps it while it delivers, and replaces it.

Each `DraftSession` of a choice has one assignment.
"""

from __future__ import annotations

from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.wire.processes.health import CallOutcome
from outrider.wire.requests.drafters import Drafter


class DraftAssignment:
    """Chooses the draft worker for one choice of a request, keeps it, and replaces it.

    It is kept as long as its draft tokens reach the target, because its KV cache holds the choice's tokens.
    """

    def __init__(
        self,
        model: ServedModel,
        drafter: Drafter = Drafter.MODEL,
        pool: str | None = None,
        searches: bool = False,
    ) -> None:
        """Create an assignment without a draft worker.

        drafter: drafter of the request. pool: name of the pool from which the draft worker is taken; None for any.
        searches: whether the request is a beam search.
        """
        self.member: DraftMember | None = None
        self._model = model
        self._criteria = (drafter, pool, searches)
        self._target = ""
        """Name of the target to which the draft worker delivers."""
        self._has_failed = False
        """Whether the draft worker failed or did not deliver, so that another one would be better."""
        self._is_full = False
        """Whether the draft worker had no slot for the choice, so that decoding without it would be better."""
        self.has_misbehaved = False
        """Whether the draft worker sent an invalid delivery or failed. The target must then not use its further
        deliveries."""
        self._avoid: str | None = None
        """Name of the draft worker that was left because it failed; None without one."""

    def may_stay(self, target: TargetMember) -> bool:
        """Return whether the choice's draft worker goes on drafting for this target. True if the choice has none.

        False if this worker is not connected, has no slot for the choice, is not compatible with the target, or may not
        be used because it failed several times. Also False if another worker is usable and this one has just failed,
        is silent, drains, or does not have the drafter that the request names while the other does.
        """
        draft = self.member
        if draft is None:
            return True
        if self._is_full or draft.connection is None or self._model.drafts.get(draft.name) is not draft:
            return False
        if not (
            draft.health.allows(self) and draft.deliveries[target.name].allows(self) and draft.is_compatible(target)
        ):
            return False
        if self._has_failed or draft.is_draining or draft.is_silent:
            return self._model.choose_draft(target, draft.name, *self._criteria) is None
        return not self._model.has_better_draft(draft, target, self._avoid, *self._criteria)

    def assign(self, target: TargetMember) -> bool:
        """Give the choice the best draft worker for this target if it has none. Return False if none is available."""
        if self.member is None:
            self.member = self.choose(target)
            if self.member is None:
                return False
            self.member.attach(self)
            self._has_failed = self._is_full = self.has_misbehaved = False
            self._target = ""
        if self._target != target.name:
            self._target = target.name
            self.member.deliveries[target.name].begin(self)
        return True

    def choose(self, target: TargetMember) -> DraftMember | None:
        """Return the best draft worker for the choice at this target; None if none is available.

        First come those that fit the request (its drafter, its beam search), then those with fewer choices. One that
        failed for this choice comes last.
        """
        other = self._model.choose_draft(target, self._avoid, *self._criteria)
        return other or self._model.choose_draft(target, None, *self._criteria)

    def leave(self) -> None:
        """End the assignment, if the choice has a draft worker."""
        if self.member is not None:
            self._avoid = None
            if self._has_failed:
                self._avoid = self.member.name
            self.member.detach()
            self.member = None

    def note_verified(self) -> None:
        """Record that the target verified draft tokens of the draft worker."""
        if self.member is not None:
            self.member.health.note(CallOutcome.OK)
            self.member.deliveries[self._target].note(CallOutcome.OK)
            self._has_failed = False

    def note_refused(self) -> None:
        """Record that the target refused a delivery of the draft worker as invalid, or that the draft worker failed."""
        if self.member is not None:
            self.member.health.note(CallOutcome.REFUSED)
            self._has_failed = self.has_misbehaved = True

    def note_undelivered(self) -> None:
        """Record that the draft worker has delivered nothing in the first MISSING_VERDICTS verdicts of a lease."""
        if self.member is not None:
            self.member.deliveries[self._target].note(CallOutcome.LATE)
            self._has_failed = True

    def note_error(self, code: pb.WorkerErrorCode) -> None:
        """Record that the draft worker refused to open the slot, or lost it, with this error code."""
        draft = self.member
        if draft is None:
            return
        if code == pb.WORKER_ERROR_CODE_STALE_EPOCH and draft.connection is not None:
            draft.connection.drop()  # it belongs to a process that has ended
        elif code == pb.WORKER_ERROR_CODE_DRAINING:
            draft.note_draining()
        elif code == pb.WORKER_ERROR_CODE_EXHAUSTED:
            draft.note_exhausted()
            self._has_failed = self._is_full = True
        elif code == pb.WORKER_ERROR_CODE_INTERNAL:
            self.note_refused()
