"""The gateway's part in drafting for a choice. Nothing here waits: messages need no reply, and errors are read once
they have arrived.

`DraftSession` opens the draft slot and sends it the committed tokens. `DraftAssignment` chooses the draft and replaces
it. A choice for which several pools draft has one `DraftSession` and one `DraftAssignment` for each pool.
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
"""Number of verdicts, from the beginning of a lease, after which a draft worker without a delivery counts as not
delivering. Prefilling a long prompt may take the draft worker this many steps of the target."""


class DraftSession:
    """The gateway's state for one draft worker that drafts for a choice: its slot for the choice, and how many of its
    draft tokens were accepted.

    Another draft worker may replace it while the choice runs.
    """

    def __init__(self, model: ServedModel, session: Session, index: int = 0, pool: str | None = None) -> None:
        """Create the state, without a draft worker yet.

        index: position among the choice's draft workers, from 0. pool: name of the pool from which the draft worker is
        taken; None for any.
        """
        self.slot = WorkerSlot(session.slot_id, dpb.DraftRequest)
        self._model = model
        self._draft_label = model.series.label_of(None)
        """Value of the label `draft` for the series of the current draft, or of the last one."""
        self._session = session
        self._index = index
        request = session.request
        config = model.config
        self._caller = request.scheduling.caller, request.params.greedy
        self._is_fixed = requested_speculation(request, config).is_fixed
        """Whether the number of draft tokens is fixed: the target then waits for drafts, whether they pay or not."""
        searches = request.params.beams is not None
        self._assignment = DraftAssignment(model, model.drafter_for(request), pool, searches)
        self._replies: Replies[dpb.DraftReply] | None = None
        """Replies to the OpenSlot: its result, and later errors of the slot."""
        self._is_ahead = False
        """Whether the draft tree already goes beyond the last verdict, so that the draft may have nothing left to do.
        """
        self._sent_ticket: int | None = None
        """Ticket that was last sent to a draft; None before the first."""
        self._num_missing = 0
        """Number of verdicts in a row without a delivery."""
        self._use = DraftUse()
        self._is_unfit = False
        """Whether a draft refused the request as invalid, so that no other draft would accept it."""

    @property
    def member(self) -> DraftMember | None:
        """Draft worker that is assigned now; None without one."""
        return self._assignment.member

    @property
    def metrics(self) -> PairMetrics:
        """Metric series of the rounds of this pair of target model and draft model."""
        return self._model.series.pair(self._draft_label)

    def choose(self, target: TargetMember) -> pb.WorkerInfo | None:
        """Return the WorkerInfo of the assigned draft worker, or else of the one that would be assigned for this
        target.

        None means that no draft worker is available.
        """
        draft = self.member or self._assignment.choose(target)
        if draft is None or draft.connection is None:
            return None
        return draft.connection.info

    def place(self, target: TargetMember) -> bool:
        """Keep the assigned draft worker, or assign another for this target.

        Return whether the previous draft worker misbehaved. The target must then no longer use its deliveries.
        """
        self._read_errors()
        if self.member is not None and self._is_paused:
            return False  # nothing is sent to it until drafts are tried again
        has_misbehaved = False
        if self._is_unfit or not self._assignment.may_stay(target):
            has_misbehaved = self._assignment.has_misbehaved
            self.close()
        previous = self.member
        if not self._is_unfit and self._assignment.assign(target) and self.member is not previous:
            assert self.member is not None, "it was taken"
            self._draft_label = self._model.series.label_of(self.member)
            self._use = DraftUse()
            if not self._is_fixed:
                self._use = replace(self.member.use_of(self._caller))
        return has_misbehaved

    def advance(self, ticket: int, target: Connection, member: TargetMember) -> None:
        """Send the draft worker the tokens committed since the last message. Its slot is opened first if needed.

        ticket: ticket under which this draft worker delivers in the target's lease. target, member: connection and
        worker of the target to which the draft worker delivers.
        """
        connection = self.connection
        if connection is None or self._is_paused:
            return
        if not self.slot.is_open_on(connection, target.epoch) and not self._open(connection, target, member):
            return
        session = self._session
        advance = dpb.Advance(
            slot=session.slot_id,
            ticket=ticket,
            is_missed=not self._is_ahead,
            **session.fields_after(self.slot.agreed_len),
        )
        connection.send(dpb.DraftRequest(advance=advance), owes_step=not self._is_ahead)
        self.slot.agreed_len = session.committed_len
        self._sent_ticket = ticket

    @property
    def _is_paused(self) -> bool:
        return not self._use.is_in_use

    @property
    def is_unprofitable(self) -> bool:
        """Whether the draft worker drafts nothing until its next trial, because too few of its draft tokens were
        accepted, or the target skipped them as not worth their time.
        """
        return self._is_paused and self._use.had_drafts

    @property
    def is_active(self) -> bool:
        """Whether the gateway sends committed tokens to a draft worker now. Otherwise no deliveries can be expected."""
        return self.connection is not None and not self._is_paused

    def is_ticket_reused(self, ticket: int, target: Connection) -> bool:
        """Return whether the draft worker needs a new slot, although an earlier slot has been given this ticket.

        Under the rule `rejection` the target keeps the first delivery of a node under a ticket, so those of the new
        slot would be useless. ticket: ticket for this draft worker in the lease. target: connection of the lease's
        target.
        """
        connection = self.connection
        is_new = connection is not None and not self.slot.is_open_on(connection, target.epoch)
        return is_new and self._sent_ticket == ticket

    @property
    def connection(self) -> Connection | None:
        """Connection to the draft worker; None if it cannot propose tokens now.

        That is the case if none is assigned or connected, if no further draft token fits into the output or the
        worker's context, or if the worker cannot draft for the request's beam search.
        """
        if self.member is None or self._session.max_draft_tokens() < 1:
            return None
        connection = self.member.connection
        if connection is None:
            return None
        if self._session.request.params.beams is not None and not connection.info.supports_beams:
            return None
        if self._session.committed_len + 1 >= connection.info.context_limit:
            return None
        return connection

    def note(self, verdict: tpb.Verdict) -> None:
        """Record what a verdict shows of the draft worker: whether it delivers, and whether enough draft tokens are
        accepted.
        """
        outcome = verdict.outcomes[self._index]
        self._note_use(verdict, outcome)
        if self._replies is None:
            return
        self._is_ahead = outcome.has_drafts
        if outcome.is_refused:
            self._assignment.note_refused()
        elif outcome.is_verified:
            self._assignment.note_verified()
        self._num_missing += 1
        if outcome.HasField("has_drafts"):
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
        has_delivered = outcome.HasField("has_drafts")
        if draft is None or self._is_fixed or not (has_delivered or self._is_paused):
            return
        num_tokens = len(verdict.token_ids) or len(verdict.levels)
        num_added = max(0, min(outcome.num_accepted, num_tokens - 1))  # none after the end of the output
        is_ready = outcome.has_drafts or verdict.fallback == tpb.FALLBACK_REASON_DOES_NOT_PAY
        self._use.note(num_added, num_tokens, is_ready=is_ready)
        draft.use_of(self._caller).note(num_added, num_tokens, is_ready=is_ready)

    def close(self) -> None:
        """Close the draft slot, and end the assignment of the draft worker."""
        self._read_errors()
        self._forget()
        self.slot.close()
        self._assignment.leave()
        self._use = DraftUse()

    def _open(self, draft: Connection, target: Connection, member: TargetMember) -> bool:
        self._forget()
        session = self._session
        config = self._model.config
        speculation = speculation_of(session.request, config, (target.info, draft.info), session.num_cached)
        if speculation is None:
            return False
        message = session.open_message()
        if not draft.info.decoder_start_ids:  # it reads no source of an encoder
            message.ClearField("source_ids")
        message.speculation.CopyFrom(replace(speculation, draft_index=self._index).to_proto())
        # A draft with a shorter context drafts up to its end.
        max_tokens = draft.info.context_limit - session.num_prompt
        message.params.max_tokens = min(message.params.max_tokens, max_tokens)
        message.params.min_tokens = min(message.params.min_tokens, max_tokens)
        message.target_address = member.deliver_address
        message.target_epoch = target.epoch
        self._replies = draft.subscribe(dpb.DraftRequest(open=message), is_expecting=False)
        self.slot.note_opened(draft, len(session.committed), target.epoch)
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
        for reply in self._replies.read_available():
            if reply.WhichOneof("item") == "error":
                self._handle_error(reply.error)

    def _handle_error(self, error: pb.WorkerError) -> None:
        if error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.slot.agreed_len = min(error.committed_len, self._session.committed_len)
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
