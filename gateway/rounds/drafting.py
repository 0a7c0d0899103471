"""The draft's side of a choice. Nothing here waits: messages are one-way, and errors are read once they have arrived.

`Drafting` opens the draft slot and sends it the committed tokens. `DraftAssignment` chooses the draft and replaces it.
A choice for which several pools draft has one of each for each pool.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.rounds.draft_assignment import DraftAssignment
from gateway.rounds.session import Session
from gateway.workers.connection import Connection, WorkerSlot
from gateway.workers.drafts.draft_limits import requested_speculation, speculation_of
from gateway.workers.drafts.draft_use import DraftUse
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.peer_text import MAX_REASON_BYTES, bound_text
from outrider.wire.telemetry.log import get_logger, log_extra
from outrider.wire.telemetry.metrics import PairMetrics
from outrider.wire.transport.streams import Replies

log = get_logger(__name__)

MISSING_VERDICTS = 64
"""Number of consecutive verdicts without a delivery after which a draft counts as not delivering. It must be long
enough for a draft that only takes long to read a prompt."""


class DraftSession:
    """The drafting of one choice by one of its drafts."""

    def __init__(self, model: ServedModel, session: Session, place: int = 0, pool: str | None = None) -> None:
        """Create the drafting of a session, without a draft yet.

        place: index among the drafts of the request. pool: see `DraftAssignment`.
        """
        self.slot = WorkerSlot(session.slot_id, dpb.DraftRequest)
        self._model = model
        self._draft_label = model.series.label_of(None)
        """Label of the series of the current draft, or of the last one."""
        self._session = session
        self._place = place
        request, config = session.request, model.config
        self._caller = request.scheduling.caller, request.params.greedy
        self._is_fixed = requested_speculation(request, config).is_fixed
        """Whether the target waits for drafts, rather than using them only while they pay."""
        searches = request.params.beams is not None
        self._assignment = DraftAssignment(model, model.drafter_for(request), pool, searches)
        self._replies: Replies[dpb.DraftReply] | None = None
        """Replies to the OpenSlot: its result, and later errors of the slot."""
        self._is_ahead = False
        """Whether the draft tree reached beyond the last verdict, so that the draft may have nothing left to do."""
        self._sent_ticket: int | None = None
        """Ticket that was last sent to a draft."""
        self._num_missing = 0
        """Number of consecutive verdicts without a delivery."""
        self._use = DraftUse()
        self._is_unfit = False
        """Whether a draft refused the request itself, so that no other draft would take it."""

    @property
    def member(self) -> DraftMember | None:
        """Current draft, None without one."""
        return self._assignment.member

    @property
    def metrics(self) -> PairMetrics:
        """Series of the target's model and the draft's."""
        return self._model.series.pair(self._draft_label)

    def choose(self, target: TargetMember) -> pb.WorkerInfo | None:
        """Return the info of the draft that the request has, or would get at this target; None without one."""
        draft = self.member or self._assignment.choose(target)
        if draft is None or draft.connection is None:
            return None
        return draft.connection.info

    def place(self, target: TargetMember) -> bool:
        """Keep the draft or assign another.

        Return whether the previous draft misbehaved and must not deliver any more.
        """
        self._read_errors()
        if self.member is not None and self._pauses:
            return False  # nothing is sent to it until drafts are tried again
        has_misbehaved = False
        if self._is_unfit or not self._assignment.may_stay(target):
            has_misbehaved = self._assignment.misbehaved
            self.close()
        previous = self.member
        if not self._is_unfit and self._assignment.take(target) and self.member is not previous:
            assert self.member is not None, "it was taken"
            self._draft_label = self._model.series.label_of(self.member)
            self._use = DraftUse()
            if not self._is_fixed:
                self._use = replace(self.member.use_of(self._caller))
        return has_misbehaved

    def advance(self, ticket: int, target: Connection, member: TargetMember) -> None:
        """Send the draft the tokens committed since the last message. The first message opens the slot.

        ticket: ticket of the target's lease for this draft. target, member: the target to which the draft delivers.
        """
        connection = self.connection
        if connection is None or self._pauses:
            return
        if not self.slot.is_open_on(connection, target.epoch) and not self._open(connection, target, member):
            return
        session = self._session
        advance = dpb.Advance(
            slot=session.slot_id,
            ticket=ticket,
            is_missed=not self._is_ahead,
            **session.news(self.slot.agreed_len),
        )
        connection.send(dpb.DraftRequest(advance=advance), owes_step=not self._is_ahead)
        self.slot.agreed_len = session.committed_len
        self._sent_ticket = ticket

    @property
    def _pauses(self) -> bool:
        return not self._use.is_in_use

    @property
    def is_unprofitable(self) -> bool:
        """Whether the draft pauses although its draft tokens arrived: too few of them were accepted."""
        return self._pauses and self._use.was_ready

    @property
    def is_active(self) -> bool:
        """Whether committed tokens are sent to a draft, so that draft tokens can be expected."""
        return self.connection is not None and not self._pauses

    def reuses_ticket(self, ticket: int, target: Connection) -> bool:
        """Return whether a new slot of a draft is about to deliver under the ticket of an earlier slot.

        Under `rejection` a state has one proposal: the target keeps the first, so the new slot's deliveries would be
        useless.
        """
        connection = self.connection
        is_new = connection is not None and not self.slot.is_open_on(connection, target.epoch)
        return is_new and self._sent_ticket == ticket

    @property
    def connection(self) -> Connection | None:
        """Connection to the draft.

        None without a draft, where no draft token fits any more, and for a beam search that the draft cannot draft for.
        """
        if self.member is None or self._session.max_draft_tokens() < 1:
            return None
        connection = self.member.connection
        if connection is None:
            return None
        if self._session.request.params.beams is not None and not connection.info.beams:
            return None
        if self._session.committed_len + 1 >= connection.info.context_limit:
            return None
        return connection

    def note(self, verdict: tpb.Verdict) -> None:
        """Record what a verdict shows of the draft: its health, and whether it pays."""
        outcome = verdict.outcomes[self._place]
        self._note_use(verdict, outcome)
        if self._replies is None:
            return
        self._is_ahead = outcome.hit
        if outcome.is_refused:
            self._assignment.refused()
        elif outcome.is_verified:
            self._assignment.note_verified()
        self._num_missing += 1
        if outcome.HasField("hit"):
            self._num_missing = 0
        if self._num_missing == MISSING_VERDICTS:
            self._assignment.note_undelivered()

    def _note_use(self, verdict: tpb.Verdict, outcome: tpb.DraftOutcome) -> None:
        """New choices of the caller begin with the use that is recorded here.

        For a request with a fixed number of draft tokens nothing is recorded, because the target waits for its drafts
        whatever they add. While nothing has been delivered, the draft may be reading the prompt; MISSING_VERDICTS
        bounds that.

        # 4 draft tokens accepted, and 3 tokens committed up to the stop id: the draft added 2 of them at most
        """
        draft = self.member
        has_delivered = outcome.HasField("hit")
        if draft is None or self._is_fixed or not (has_delivered or self._pauses):
            return
        num_tokens = len(verdict.token_ids) or len(verdict.levels)
        num_added = max(0, min(outcome.num_accepted, num_tokens - 1))  # none after the end of the output
        is_ready = outcome.hit or verdict.fallback == tpb.FALLBACK_REASON_DOES_NOT_PAY
        self._use.note(num_added, num_tokens, is_ready=is_ready)
        draft.use_of(self._caller).note(num_added, num_tokens, is_ready=is_ready)

    def close(self) -> None:
        """Close the slot and leave the draft."""
        self._read_errors()
        self._forget()
        self.slot.close()
        self._assignment.leave()
        self._use = DraftUse()

    def _open(self, draft: Connection, target: Connection, member: TargetMember) -> bool:
        self._forget()
        session, config = self._session, self._model.config
        speculation = speculation_of(session.request, config, (target.info, draft.info), session.num_held)
        if speculation is None:
            return False
        message = session.open_message()
        if not draft.info.decoder_start_ids:  # it reads no source of an encoder
            message.ClearField("source_ids")
        message.speculation.CopyFrom(replace(speculation, place=self._place).to_proto())
        # A draft with a shorter context drafts up to its end.
        max_tokens = draft.info.context_limit - session.num_prompt
        message.params.max_tokens = min(message.params.max_tokens, max_tokens)
        message.params.min_tokens = min(message.params.min_tokens, max_tokens)
        message.deliver_to = member.deliver_address
        message.target_epoch = target.epoch
        self._replies = draft.subscribe(dpb.DraftRequest(open=message), expects=False)
        self.slot.opened(draft, len(session.committed), target.epoch)
        return True

    def _forget(self) -> None:
        if self._replies is not None:
            self._replies.close()
        self._replies = None
        self._num_missing = 0
        self._is_ahead = False

    def _read_errors(self) -> None:
        if self._replies is None:
            return
        for reply in self._replies.take():
            if reply.WhichOneof("item") == "error":
                self._handle_error(reply.error)

    def _handle_error(self, error: pb.WorkerError) -> None:
        if error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.slot.agreed_len = min(error.known_len, self._session.committed_len)
            return
        slot = self._session.slot_id
        name: str | None = None
        if self.member is not None:
            name = self.member.name
        why = bound_text(error.message, MAX_REASON_BYTES)
        log.info("the draft refused slot %d: %s", slot, why, extra=log_extra(slot=slot, member=name))
        self.slot.open_again()
        self._is_unfit |= error.code == pb.WORKER_ERROR_CODE_INVALID
        self._assignment.note_error(error.code)
