"""A request's part in the drafts that its target makes itself: whether they are asked for, and how many.

The target's drafter follows the slot there, so nothing is sent and nobody is waited for: a verify says how many tokens
are to be drafted, and its verdict whether the drafter has something to say next.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.links import Connection
from gateway.served import ServedModel
from gateway.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import Drafter
from outrider.wire.metrics import PairMetrics


@dataclass(frozen=True, slots=True)
class OwnRound:
    drafter: str
    num_draft_tokens: int
    """K; 0 where no room is left."""
    metrics: PairMetrics

    @property
    def why_plain(self) -> str:
        """If it has no drafts: one of PLAIN_REASONS."""
        return "nothing" if self.num_draft_tokens else "end"


class OwnDrafts:
    def __init__(self, model: ServedModel, session: Session) -> None:
        self._model = model
        self._session = session
        self._wish = model.drafter_for(session.request)
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
        if kind is None or not self._wanted():
            return None
        if kind.value in target.info.drafters:
            return kind
        if not any(draft.kind is kind for draft in self._model.drafts.values()):
            name = target.info.model_id
            self._model.warn_once(
                f"the target {name} has no drafter {kind.label}: its requests are drafted for by a model"
            )
        return None

    def plan(self, target: Connection) -> OwnRound | None:
        """The next round, if the target is to draft for it; None where a draft worker may be asked."""
        kind = self.kind(target)
        if kind is None or (self._wish.asks_model and not self._has_next):
            return None
        num_draft_tokens = max(0, min(self._wanted(), self._session.draft_room()))
        return OwnRound(kind.label, num_draft_tokens, self._model.own_metrics(kind))

    def note_verdict(self, verdict: tpb.Verdict) -> None:
        self._has_next = verdict.drafter_has_next

    def _wanted(self) -> int:
        options = self._session.request.speculation
        if not options.enabled:
            return 0
        return self._model.config.num_draft_tokens if options.num_draft_tokens is None else options.num_draft_tokens
