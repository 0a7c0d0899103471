"""The draft's part of a round. Nothing here waits for long.

`DraftAssignment` says which draft a request has, and when it is given another; `Drafting` when to ask it, what to ask,
and what its answers teach.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass

from gateway.planning.wait_budget import Backoff
from gateway.rounds.draft_length import DraftLength, both_take_trees, room_for_nodes, tree_of
from gateway.rounds.session import Session
from gateway.telemetry.round_metrics import note_fallback, note_proposal
from gateway.workers.links import Connection, WorkerSlot
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.health import Outcome
from outrider.wire.kinds import Drafter
from outrider.wire.log import about, get_logger
from outrider.wire.params import read_draft_logprobs
from outrider.wire.tree_shape import TreeShape


class DraftAssignment:
    """Of one request. It keeps its draft, whose cache knows it, while that does its part."""

    def __init__(self, model: ServedModel, drafter: Drafter = Drafter.MODEL) -> None:
        self.member: DraftMember | None = None
        self._model = model
        self._drafter = drafter
        self._target = ""
        """Whose proposals they are for."""
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
        if not (draft.health.lets(self) and draft.deliveries[target.name].lets(self)):
            return False
        if self._failed or draft.draining or (unanswered and draft.silent):
            return self._model.choose_draft(target, draft.name, self._drafter) is None
        return unanswered or not self._model.has_better_draft(draft, target, self._avoid, self._drafter)

    def take(self, target: TargetMember) -> bool:
        """Gives it a draft if it has none. False when none is to be had."""
        if self.member is None:
            self.member = self._choose(target, self._avoid) or self._choose(target, None)
            if self.member is None:
                return False
            self.member.attach(self)
            self._failed = self._is_full = False
            self._target = ""
        if self._target != target.name:
            self._target = target.name
            self.member.deliveries[target.name].begin(self)
        return True

    def _choose(self, target: TargetMember, avoid: str | None) -> DraftMember | None:
        return self._model.choose_draft(target, avoid, self._drafter)

    def leave(self) -> None:
        if self.member is not None:
            self._avoid = self.member.name if self._failed else None
            self.member.detach()
            self.member = None

    def did_well(self) -> None:
        """A proposal of it was verified."""
        if self.member is not None:
            self.member.health.note(Outcome.OK)
            self.member.deliveries[self._target].note(Outcome.OK)
            self._failed = False

    def refused(self) -> None:
        """A proposal of it broke a rule, or it could not make one."""
        if self.member is not None:
            self.member.health.note(Outcome.REFUSED)
            self._failed = True

    def undelivered(self) -> None:
        """A proposal was made in time and did not arrive in time."""
        if self.member is not None:
            self.member.deliveries[self._target].note(Outcome.LATE)

    def is_slow(self) -> None:
        """Its proposals keep coming too late, for whatever reason."""
        self._failed = True

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


log = get_logger(__name__)

REPLY_GRACE_S = 0.05
DRAFT_TOPK = 128
"""Tokens of a law that is cut where nobody says how many. Twice as many: twice the bytes, a little more is kept."""
MAX_LATE = 3
"""Proposals in a row that were late; then another draft is better, if there is one."""


@dataclass(frozen=True)
class Proposing:
    """A Propose on its way."""

    future: asyncio.Future[dpb.DraftReply]
    draft: DraftMember
    ticket: int
    committed_len: int
    sent_s: float
    is_first: bool
    """It opened the slot."""
    num_new: int
    """Committed tokens that the draft had not seen."""

    def fed_prompt(self, reply: dpb.ProposeReply) -> bool:
        """Whether it began from nothing: as the first one does, and any whose cache was taken for others meanwhile."""
        return self.is_first or reply.num_fed_tokens > self.num_new + 1  # the last one seen may be fed again


class Drafting:
    def __init__(self, model: ServedModel, session: Session) -> None:
        self.slot = WorkerSlot(session.slot_id, dpb.DraftRequest)
        self.last_propose_s = 0.0
        """Queue and compute of the last proposal, by the draft's own clock."""
        self.wait_budget_s = 0.0
        """How long the target may wait for the proposal that was asked for last."""
        self.why_plain = "end"
        """Why the last round has no drafts, if it has none: one of PLAIN_REASONS."""
        self.asked_for_tree = False
        """The last proposal was to be a tree."""
        self.metrics = model.pair_metrics(None)
        """Of the target's model and that of the draft it has, or had last."""
        self._model = model
        self._session = session
        self._assignment = DraftAssignment(model, model.drafter_for(session.request))
        self._tree = tree_of(session.request, model.config)
        self._backoff = Backoff()
        self._length = DraftLength(model, session, self._tree)
        self._num_asked = 0
        """K of the last round."""
        self._proposing: Proposing | None = None
        self._replied: tuple[int, int, bool] = (0, 0, False)
        """Ticket and tokens of the last proposal that the draft answered, and whether that was within the budget."""
        self._unverified: set[int] = set()
        """Tickets whose rounds ended without their proposals, which are still on their way."""

    @property
    def member_name(self) -> str | None:
        """Of the draft it has; None without one."""
        return None if self._assignment.member is None else self._assignment.member.name

    def propose(self, ticket: int, target: Connection, member: TargetMember) -> int:
        """Sends Open (once a connection) and Propose together. Returns K; 0 = nothing sent, the round is plain.

        While an earlier proposal is still unanswered the rounds are plain: a hung draft costs one wait budget.
        """
        self._num_asked = 0
        self._length.begin(target)
        if self._length.rests and self._proposing is None:
            self.asked_for_tree = False
            self._length.skip()
            return self._does_not_pay()
        draft = None if self._length.fixed == 0 else self._place(member)
        connection = None if draft is None else draft.connection
        room, tree = (0, None) if connection is None else self._room(target, connection)
        self.asked_for_tree = tree is not None
        if draft is None or connection is None or not room:
            self.why_plain = self._why_never(connection is not None)
            self._length.skip()
            return 0
        if self._proposing is not None or not self._backoff.may_draft():
            self.why_plain = "pause" if self._proposing is None else "busy"
            self._length.skip()
            return 0
        is_first = not self.slot.is_open_on(connection, target.epoch)
        num_behind = self._session.committed_len - (0 if is_first else self.slot.agreed_len)
        choice = self._length.choose(room, member, draft, connection.epoch, num_behind)
        num_draft_tokens = self._num_asked = choice.num_draft_tokens
        if not num_draft_tokens:
            return self._does_not_pay()
        if self._length.fixed is None:
            self.metrics.planned.observe(num_draft_tokens)
        self.why_plain = "end"
        if is_first:
            opening = connection.call(dpb.DraftRequest(open=self._open_message(target, member, connection)))
            opening.add_done_callback(functools.partial(self._on_opened, draft))
            self.slot.opened(connection, self._session.committed_len, target.epoch)
        future = connection.call(dpb.DraftRequest(propose=self._propose_message(ticket, num_draft_tokens, tree)))
        committed_len = self._session.committed_len
        num_new = committed_len - self.slot.agreed_len
        proposing = Proposing(future, draft, ticket, committed_len, time.monotonic(), is_first, num_new)
        self._proposing = proposing
        usual_s = (draft.first_wait_budget if is_first else draft.wait_budget).seconds
        self.wait_budget_s = min(usual_s, choice.wait_s)
        future.add_done_callback(functools.partial(self._on_reply, proposing))
        return num_draft_tokens

    def _does_not_pay(self) -> int:
        if self._length.fixed is None:
            self.metrics.planned.observe(0)
        self.why_plain = "does_not_pay"
        return 0

    def skip(self, target: Connection) -> None:
        """The target drafted for the round itself."""
        self._length.begin(target)
        self._length.skip()

    async def let_reply_arrive(self) -> None:
        """The draft's reply left together with the proposal that was verified: it is here, or about to be."""
        if self._proposing is not None:
            await asyncio.wait({self._proposing.future}, timeout=REPLY_GRACE_S)
            await asyncio.sleep(0)  # its callback

    def note_verdict(self, verdict: tpb.Verdict, ticket: int, total_s: float, is_new_step: bool) -> None:
        """Of a round that took `total_s`. A draft that was late or refused is left alone a while."""
        if not self._length.note(verdict, total_s, is_new_step):
            self._assignment.is_slow()
        if not self._num_asked:
            return
        if verdict.fallback == tpb.FALLBACK_REASON_UNSPECIFIED:
            self._model.num_rounds += 1
            if not verdict.num_drafted:
                self.why_plain = "nothing"
            self._backoff.in_time()
            self._assignment.did_well()
            return
        if verdict.fallback == tpb.FALLBACK_REASON_LATE and not self.wait_budget_s:
            self.why_plain = "not_waited"
        else:
            self._note_failed(verdict, ticket)
        replied, num_tokens, _ = self._replied
        if replied == ticket:
            self._note_wasted(num_tokens)
        else:
            self._unverified = {ticket}

    def _note_failed(self, verdict: tpb.Verdict, ticket: int) -> None:
        """The proposal was waited for in vain, or could not be used."""
        self._model.num_rounds += 1
        self._model.num_late += verdict.fallback == tpb.FALLBACK_REASON_LATE
        self._backoff.late()
        self.why_plain = "late" if verdict.fallback == tpb.FALLBACK_REASON_LATE else "refused"
        note_fallback(self._model.metrics, verdict.fallback)
        replied, _, in_budget = self._replied
        if verdict.fallback == tpb.FALLBACK_REASON_REFUSED:
            self._assignment.refused()
        elif replied == ticket and in_budget:
            self._assignment.undelivered()
        if self._backoff.num_late >= MAX_LATE:
            self._assignment.is_slow()

    def close(self) -> None:
        """Free the slot; nobody waits for a proposal that is still on its way."""
        self.slot.close()
        proposing, self._proposing = self._proposing, None
        if proposing is not None:
            proposing.future.cancel()
        self._length.leave()
        self._assignment.leave()

    def _place(self, target: TargetMember) -> DraftMember | None:
        """The draft it has, or another when that does not serve it any more; None when there is none."""
        if not self._assignment.may_stay(target, unanswered=self._proposing is not None):
            self.close()
        if self._assignment.member is None and self._assignment.take(target):
            # If all drafts are slow, the pauses grow all the same.
            self._backoff = Backoff(self._backoff.num_late)
            self.metrics = self._model.pair_metrics(self._assignment.member)
        elif self._assignment.member is not None:
            self._assignment.take(target)
        return self._assignment.member

    def _note_wasted(self, num_tokens: int) -> None:
        self._session.usage.num_wasted_tokens += num_tokens
        self.metrics.wasted_tokens.inc(num_tokens)

    def _room(self, target: Connection, draft: Connection) -> tuple[int, TreeShape | None]:
        """Draft tokens that the round may have, by what is left of max_tokens and of the draft's context, and their
        shape, None for a chain.
        """
        context_left = draft.info.context_limit - self._session.committed_len - 1
        room = max(0, min(self._model.config.max_draft_tokens, self._session.draft_room(), context_left))
        if self._tree is None:
            return room, None
        if not both_take_trees(target.info, draft.info):  # a chain as long as the tree is deep
            return min(self._tree.depth, room), None
        num_nodes = min(room_for_nodes(info, self._session.committed_len) for info in (target.info, draft.info))
        tree = self._tree.fitted(room, num_nodes)
        return (0, None) if tree is None else (tree.most_nodes, tree)

    def _why_never(self, connected: bool) -> str:
        """Of a round that could have no drafts."""
        if not self._model.drafts or self._length.fixed == 0:
            return "off"
        return "end" if connected or not self._session.draft_room() else "no_draft"

    def _open_message(self, target: Connection, member: TargetMember, draft: Connection) -> pb.OpenSlot:
        message = self._session.open_message()
        # A draft with a shorter context drafts as far as it reaches.
        room = draft.info.context_limit - self._session.num_prompt
        message.params.max_tokens = min(message.params.max_tokens, room)
        message.params.min_tokens = min(message.params.min_tokens, room)
        message.deliver_to = member.deliver_address
        message.target_epoch = target.epoch
        return message

    def _propose_message(self, ticket: int, num_draft_tokens: int, tree: TreeShape | None) -> dpb.Propose:
        options, config = self._session.request.speculation, self._model.config
        kind, size = read_draft_logprobs(config.draft_logprobs)
        encoding = options.draft_logprobs or kind
        topk = options.draft_topk or size or DRAFT_TOPK
        return dpb.Propose(
            slot=self._session.slot_id,
            base_len=self.slot.agreed_len,
            committed_ids=self._session.committed[self.slot.agreed_len :],
            num_draft_tokens=num_draft_tokens,
            ticket=ticket,
            draft_logprobs=encoding.value,
            draft_topk=min(topk, self._model.reference.info.vocab_size),
            tree=None if tree is None else tree.to_proto(),
            min_confidence=0.0 if self._is_named else config.min_confidence,
        )

    @property
    def _is_named(self) -> bool:
        """The request says how much is drafted."""
        return self._tree is not None or self._session.request.speculation.num_draft_tokens is not None

    def _on_opened(self, draft: DraftMember, future: asyncio.Future[dpb.DraftReply]) -> None:
        """A refused open shows in the propose's answer, too, but only here is why."""
        if future.cancelled() or future.exception() is not None or draft is not self._assignment.member:
            return
        if future.result().WhichOneof("item") == "error":
            self._assignment.answered_with(future.result().error.code)

    def _on_reply(self, proposing: Proposing, future: asyncio.Future[dpb.DraftReply]) -> None:
        """The draft answered, in time or not, or was lost."""
        if proposing is not self._proposing:
            return  # of a draft that it has left
        self._proposing = None
        if future.cancelled() or future.exception() is not None:
            self.slot.open_again()
            return
        reply, draft = future.result(), proposing.draft
        if reply.WhichOneof("item") == "propose":
            self.slot.agreed_len = proposing.committed_len
            took_s = time.monotonic() - proposing.sent_s
            self._replied = (proposing.ticket, len(reply.propose.draft_ids), took_s <= self.wait_budget_s)
            if proposing.ticket in self._unverified:
                self._unverified.clear()
                self._note_wasted(len(reply.propose.draft_ids))
            self.last_propose_s = (reply.propose.queue_us + reply.propose.compute_us) / 1e6
            fed_prompt = proposing.fed_prompt(reply.propose)
            (draft.first_wait_budget if fed_prompt else draft.wait_budget).observe(took_s)
            self._length.replied(reply.propose, took_s)
            note_proposal(self._model.metrics, reply.propose)
        elif reply.error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.slot.agreed_len = min(reply.error.known_len, proposing.committed_len)
        else:
            slot = self._session.slot_id
            log.info(
                "the draft refused slot %d: %s",
                slot,
                reply.error.message,
                extra=about(slot=slot, member=proposing.draft.name),
            )
            self.slot.open_again()
            self._assignment.answered_with(reply.error.code)
