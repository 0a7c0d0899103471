"""A request's part in the drafts that its target makes itself: whether they are asked for, and how many.

The target's drafter follows the slot there, so nothing is sent and nobody is waited for: a verify says how many tokens
are to be drafted, and its verdict whether the drafter has something to say next.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.draft_length import DraftLength
from gateway.links import Connection
from gateway.member import TargetMember
from gateway.served import ServedModel
from gateway.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import Drafter
from outrider.wire.metrics import PairMetrics
from outrider.wire.params import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class OwnRound:
    drafter: str
    num_draft_tokens: int
    """K; 0 where no room is left, or drafts do not pay."""
    metrics: PairMetrics
    why_plain: str
    """If it has no drafts: one of PLAIN_REASONS."""


class OwnDrafts:
    def __init__(self, model: ServedModel, session: Session) -> None:
        self._model = model
        self._session = session
        self._wish = model.drafter_for(session.request)
        self._length = DraftLength(model, session)
        self._has_next = True
        """The target's drafter has something to say, as far as is known."""

    def open_message(self, target: Connection) -> pb.OpenSlot:
        """Of the request's slot there, followed by the drafter that it has of its own, if any."""
        message, kind = self._session.open_message(), self.kind(target)
        if kind is not None:
            message.drafter = kind.value
        self._has_next = True
        return message

    def kind(self, target: Connection) -> Drafter | None:
        """Of the target's own drafters, the request's; None where it has none, or asks for a model alone."""
        kind = self._wish.own
        if kind is None or self._length.fixed == 0:
            return None
        if kind.value in target.info.drafters:
            return kind
        if not any(draft.kind is kind for draft in self._model.drafts.values()):
            name = target.info.model_id
            self._model.warn_once(
                f"the target {name} has no drafter {kind.label}: its requests are drafted for by a model"
            )
        return None

    def plan(self, target: Connection, member: TargetMember) -> OwnRound | None:
        """The next round, if the target is to draft for it; None where a draft worker may be asked."""
        self._length.begin(target)
        kind = self.kind(target)
        if kind is None or (self._wish.asks_model and not self._has_next):
            return None
        metrics = self._model.own_metrics(kind)
        room = max(0, min(MAX_DRAFT_TOKENS, self._session.draft_room()))
        if room and self._length.fixed is None and not self._has_next:
            self._length.skip()
            return OwnRound(kind.label, 0, metrics, "nothing")
        num_draft_tokens = self._length.choose_own(room, member, kind.label)
        if room and not num_draft_tokens and self._wish.asks_model:  # what a model drafts may pay all the same
            return None
        if room and self._length.fixed is None:
            metrics.planned.observe(num_draft_tokens)
        why_plain = "nothing" if num_draft_tokens else "does_not_pay" if room else "end"
        return OwnRound(kind.label, num_draft_tokens, metrics, why_plain)

    def skip(self, verdict: tpb.Verdict) -> None:
        """Of a round that a draft worker was asked for, or nobody."""
        self._has_next = verdict.drafter_has_next
        self._length.skip()

    def note_verdict(self, verdict: tpb.Verdict, total_s: float, is_new_step: bool) -> None:
        """Of a round that the target was to draft for."""
        self._has_next = verdict.drafter_has_next
        self._length.note(verdict, total_s, is_new_step)

    def close(self) -> None:
        """The request has ended."""
        self._length.leave()
