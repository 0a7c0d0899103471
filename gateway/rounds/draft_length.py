"""How many tokens a request's next round drafts: what it or the gateway says, or what its target's planner finds.

A request's part in the drafts that its target makes itself: whether they are asked for, and how many.

The target's drafter follows the slot there, so nothing is sent and nobody is waited for: a verify says how many tokens
are to be drafted, and its verdict whether the drafter has something to say next.

Which rounds of a request draft a tree, and of what shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.generation import GenerationRequest
from gateway.planning.draft_costs import DraftSource
from gateway.planning.slot_plan import PLAIN, DraftChoice, SlotPlan
from gateway.rounds.session import Session
from gateway.workers.links import Connection
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import Drafter
from outrider.wire.metrics import PairMetrics
from outrider.wire.params import AUTO, SamplingParams
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.tree_shape import TreeShape


def tree_of(request: GenerationRequest, config: GatewayConfig) -> TreeShape | None:
    """The shape of the request's proposals; None for chains. What is set for all does not contradict who asks for a
    chain's length, or for lenience, which is of chains alone.
    """
    options = request.speculation
    if options.tree is not None or not config.tree:
        return options.tree
    if options.num_draft_tokens is not None or options.adaptive or request.params.lenience < 1.0:
        return None
    return TreeShape.parse(config.tree)


def both_take_trees(target: pb.WorkerInfo, draft: pb.WorkerInfo) -> bool:
    return target.trees and draft.trees


def room_for_nodes(worker: pb.WorkerInfo, committed_len: int) -> int:
    """In its cache, were the request alone there; a block may have to be copied."""
    return max(0, (worker.num_kv_blocks - 1) * worker.kv_block_size - committed_len)


UNBOUNDED_S = 1e9
HOT = 0.75
"""From this temperature on, drafts are kept less often than below it."""


class DraftLength:
    """Of one request."""

    def __init__(self, model: ServedModel, session: Session, tree: TreeShape | None = None) -> None:
        """tree: the shape of the request's proposals, which is as fixed as a number."""
        self._model = model
        self._session = session
        options = session.request.speculation
        asked = options.num_draft_tokens if tree is None else tree.most_nodes
        if asked is None and not options.adaptive and model.config.num_draft_tokens != AUTO:
            asked = model.config.num_draft_tokens
        self.fixed: int | None = asked if options.enabled else 0
        """None: planned."""
        self._plan: SlotPlan | None = None
        self._asked = 0
        self._target: Connection | None = None
        self._is_first = True
        """The round is the first on this connection: it feeds the target its prompt."""

    def begin(self, target: Connection) -> None:
        """A round begins there. What is seen of another target is not the plan's."""
        self._is_first = target is not self._target
        if self._is_first:
            self.leave()
        self._target = target

    @property
    def rests(self) -> bool:
        """The round is plain, as the ones before it: there is nothing to choose."""
        return self._plan is not None and self._plan.rests

    def choose(self, room: int, target: TargetMember, draft: DraftMember, epoch: int, num_behind: int) -> DraftChoice:
        """room: draft tokens that the round may have; num_behind: committed tokens that the draft has not seen."""
        if self.fixed is not None:
            return DraftChoice(min(self.fixed, room), UNBOUNDED_S)
        return self._choose(target, target.planner.source(draft.name, epoch), room, num_behind)

    def choose_own(self, room: int, target: TargetMember, drafter: str) -> int:
        """K of a round that the target drafts for itself."""
        if self.fixed is not None:
            return min(self.fixed, room)
        source = target.planner.source(f"own {drafter}", own=True)
        if self.rests and self._plan is not None and self._plan.source is source:
            self.skip()
            return 0
        return self._choose(target, source, room, num_behind=0).num_draft_tokens

    def skip(self) -> None:
        """The round is plain for another reason."""
        self._asked = 0
        if self._plan is not None:
            self._plan.skip()

    def note(self, verdict: tpb.Verdict, total_s: float, is_new_step: bool) -> bool:
        """A round took so long; is_new_step: its verdict is the first of its step. False: its draft is too slow for
        this target, another might not be.
        """
        plan = self._plan
        if plan is None:
            return True
        fed_prompts = self._is_first or verdict.num_batch_prompt_tokens > 0
        step_s, wait_s = (verdict.forward_us + verdict.accept_us) / 1e6, verdict.wait_us / 1e6
        if self._asked and verdict.fallback == tpb.FALLBACK_REASON_UNSPECIFIED:
            # A proposal that ended early counts as one whose next token was not kept.
            plan.verified(self._asked, verdict.num_accepted, wait_s, step_s, total_s, fed_prompts, is_new_step)
        else:
            plan.plain(total_s, step_s, fed_prompts, is_new_step, wait_s)
        return not plan.takes_too_long()

    def replied(self, reply: dpb.ProposeReply, took_s: float) -> None:
        """The proposal was made, in time or not."""
        if self._plan is not None:
            compute_s = (reply.queue_us + reply.compute_us) / 1e6
            self._plan.replied(took_s, compute_s, len(reply.draft_ids), reply.num_fed_tokens)

    def leave(self) -> None:
        """The draft is not asked any more."""
        self._asked = 0
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.leave()

    def _choose(self, target: TargetMember, source: DraftSource, room: int, num_behind: int) -> DraftChoice:
        if self._plan is None or self._plan.source is not source:
            self.leave()
            self._plan = SlotPlan(target.planner, source, kind_of(self._session.request.params))
        if room < 1:
            self.skip()
            return PLAIN
        choice = self._plan.choose(room, num_behind, self._num_left, self._is_first)
        self._asked = choice.num_draft_tokens
        return choice

    def _num_left(self) -> float:
        return self._model.lengths.remaining(self._session.num_output, self._session.request.params.max_tokens)


def kind_of(params: SamplingParams) -> tuple[object, ...]:
    """Requests of one kind have drafts kept about as often."""
    if params.greedy:
        return (0, round(params.lenience, 1))
    return (2 if params.temperature >= HOT else 1, params.acceptance, round(params.lenience, 1))


@dataclass(frozen=True, slots=True)
class OwnRound:
    drafter: str
    num_draft_tokens: int
    """K; 0 where no room is left, or drafts do not pay."""
    metrics: PairMetrics
    why_plain: str
    """If it has no drafts: one of PLAIN_REASONS."""


class TargetDrafts:
    def __init__(self, model: ServedModel, session: Session) -> None:
        self._model = model
        self._session = session
        self._drafter = model.drafter_for(session.request)
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
        kind = self._drafter.own
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
        if kind is None or (self._drafter.asks_model and not self._has_next):
            return None
        metrics = self._model.own_metrics(kind)
        room = max(0, min(self._model.config.max_draft_tokens, self._session.draft_room()))
        if room and self._length.fixed is None and not self._has_next:
            self._length.skip()
            return OwnRound(kind.label, 0, metrics, "nothing")
        num_draft_tokens = self._length.choose_own(room, member, kind.label)
        if room and not num_draft_tokens and self._drafter.asks_model:  # what a model drafts may pay all the same
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
