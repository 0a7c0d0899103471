"""Which draft a request has, and when it is given another."""

from __future__ import annotations

from gateway.member import DraftMember, TargetMember
from gateway.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import Drafter


class DraftSeat:
    """Of one request. It keeps its draft, whose cache knows it, while that does its part."""

    def __init__(self, model: ServedModel, wish: Drafter = Drafter.MODEL) -> None:
        self.member: DraftMember | None = None
        self._model = model
        self._wish = wish
        self._target = ""
        """Whose proposals they are for."""
        self._probes = False
        """It was placed where a breaker is open, to see."""
        self._failed = False
        """The draft did not do its part: another would be better."""
        self._is_full = False
        """The draft had no slot for it: none at all would be better."""
        self._avoid: str | None = None
        """The draft that it left for that."""

    def may_stay(self, target: TargetMember, unanswered: bool) -> bool:
        """`unanswered`: the draft owes it a proposal. True when there is no draft to leave."""
        draft = self.member
        if draft is None:
            return True
        if self._is_full or draft.connection is None or self._model.drafts.get(draft.name) is not draft:
            return False
        if not self._probes and (draft.breaker.is_open or draft.deliveries[target.name].is_open):
            return False
        if self._failed or draft.draining or (unanswered and draft.silent):
            return self._model.choose_draft(target, draft.name, self._wish) is None
        return unanswered or not self._model.has_better_draft(draft, target, self._avoid, self._wish)

    def take(self, target: TargetMember) -> bool:
        """Gives it a draft if it has none. False when none is to be had."""
        if self.member is None:
            self.member = self._choose(target, self._avoid) or self._choose(target, None)
            if self.member is None:
                return False
            self.member.attach()
            self._failed = self._probes = self._is_full = False
            self._target = ""
        if self._target != target.name:
            delivery = self.member.deliveries[target.name]
            self._probes = self.member.breaker.is_open or delivery.is_open
            self._target = target.name
            delivery.begin()
        return True

    def _choose(self, target: TargetMember, avoid: str | None) -> DraftMember | None:
        return self._model.choose_draft(target, avoid, self._wish)

    def leave(self) -> None:
        if self.member is not None:
            self._avoid = self.member.name if self._failed else None
            self.member.detach()
            self.member = None

    def did_well(self) -> None:
        """A proposal of it was verified."""
        if self.member is not None:
            self.member.breaker.succeeded()
            self.member.deliveries[self._target].succeeded()
            self._failed = self._probes = False

    def refused(self) -> None:
        """A proposal of it broke a rule, or it could not make one."""
        if self.member is not None:
            self.member.breaker.failed()
            self._failed, self._probes = True, False

    def undelivered(self) -> None:
        """A proposal was made in time and did not arrive in time."""
        if self.member is not None:
            self.member.deliveries[self._target].failed()

    def is_slow(self) -> None:
        """Its proposals keep coming too late, for whatever reason."""
        self._failed, self._probes = True, False

    def answered_with(self, code: pb.WorkerErrorCode) -> None:
        """Instead of a proposal."""
        draft = self.member
        if draft is None:
            return
        if code == pb.WORKER_ERROR_CODE_STALE_EPOCH and draft.connection is not None:
            draft.connection.drop()  # we talk to a life that is over
        elif code == pb.WORKER_ERROR_CODE_DRAINING:
            draft.told_draining()
        elif code == pb.WORKER_ERROR_CODE_EXHAUSTED:
            draft.told_exhausted()
            self._failed = self._is_full = True
        elif code == pb.WORKER_ERROR_CODE_INTERNAL:
            self.refused()
