"""How many tokens a request's next round drafts: what it or the gateway says, or what its target's planner finds."""

from __future__ import annotations

from gateway.draft_costs import DraftSource
from gateway.links import Connection
from gateway.member import DraftMember, TargetMember
from gateway.served import ServedModel
from gateway.session import Session
from gateway.slot_plan import PLAIN, Choice, SlotPlan
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.params import AUTO, SamplingParams
from outrider.wire.tree_shape import TreeShape

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

    def choose(self, room: int, target: TargetMember, draft: DraftMember, epoch: int, num_behind: int) -> Choice:
        """room: draft tokens that the round may have; num_behind: committed tokens that the draft has not seen."""
        if self.fixed is not None:
            return Choice(min(self.fixed, room), UNBOUNDED_S)
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

    def _choose(self, target: TargetMember, source: DraftSource, room: int, num_behind: int) -> Choice:
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
