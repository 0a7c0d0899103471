"""A proposal being drafted: what it has so far, and what it will draw with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from draft_service.jobs import ProposeJob
from draft_service.tree_growth import Growth, tree_row
from outrider.engine.cuda.host_copy import HostCopy
from outrider.engine.noise import Purpose
from outrider.engine.open_slots import BareSlot
from outrider.engine.row_law import RowLaw
from outrider.engine.scheduler import Want
from outrider.engine.slot_noise import host_slot_uniforms
from outrider.engine.slots import Slot
from outrider.engine.step_plan import Row
from outrider.engine.turns import Wish


@dataclass(frozen=True, slots=True)
class CopiedLaw:
    """A law on its way from a device. Whoever needs it waits for it, on any thread."""

    copy: HostCopy
    """Of [..., V] float32 log-probs."""
    place: tuple[int, ...]
    """Of this law among them."""

    def wait(self) -> RowLaw:
        scores = self.copy.wait()[self.place].numpy()
        return RowLaw(scores.size, scores)


Law = RowLaw | CopiedLaw


class Drawn(NamedTuple):
    """A token of a proposal."""

    token_id: int
    law: Law | None
    """What it was drawn from; None where proposals are ids alone."""
    chance: float | None = None
    """Its probability under the draft, of a proposal that may end for want of confidence."""


@dataclass(slots=True)
class Payload:
    """How much of a proposal has left, and in what form. Of the gRPC loop's thread, on which it leaves."""

    num_bytes: int = 0
    encoding: str = "ids"


@dataclass(slots=True)
class Asked:
    """A proposal that was asked for, with a model or without."""

    job: ProposeJob
    slot: BareSlot
    deliver_to: str
    target_epoch: int
    topk: int | None
    """Cut each law to this many best tokens before drawing; None = the whole law."""
    draft_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Of a tree, which is here when it is grown: as many as draft_ids."""
    unsent: list[Law] = field(default_factory=list)
    """What drafted tokens that have not been sent yet were drawn from."""
    num_sent: int = 0
    payload: Payload = field(default_factory=Payload)
    started_s: float | None = None
    num_fed: int = 0
    length: int | None = None
    """Tokens that it ends with, once that is known to be before all that were asked for."""
    confidence: float = 1.0
    """Probability under the draft of all its tokens, of one that is `watched`."""

    @property
    def watched(self) -> bool:
        """It ends where the draft is no longer confident of it. One that is accepted by rejection never does: when it
        is complete would depend on what was drawn, and what is late is not verified, so that some tokens were favoured.
        """
        return self.job.min_confidence > 0.0 and self.determined

    @property
    def position(self) -> int:
        """Of its next token in the sequence."""
        return len(self.slot.committed) + len(self.draft_ids)

    @property
    def determined(self) -> bool:
        """Its tokens are guesses of what the target says, and travel as ids alone."""
        return self.slot.params.determined

    @property
    def most_laws(self) -> int:
        """That a step may add to what is sent."""
        return 1 if self.job.tree is None else self.job.tree.most_parents

    @property
    def done(self) -> bool:
        return len(self.draft_ids) >= self.num_announced

    @property
    def num_announced(self) -> int:
        """Tokens that it will have, as far as is known."""
        return self.job.num_draft_tokens if self.length is None else self.length

    def take(self, drawn: Drawn) -> None:
        """Its next token, with which it may end."""
        self.draft_ids.append(drawn.token_id)
        if drawn.law is not None:
            self.unsent.append(drawn.law)
        if drawn.chance is not None:
            self.confidence *= drawn.chance
            if self.confidence < self.job.min_confidence:
                self.length = len(self.draft_ids)

    def leave(self) -> None:
        """It is over, complete or not."""


@dataclass(slots=True)
class Active(Asked):
    """One that a model makes."""

    slot: Slot
    uniforms: list[float] = field(init=False)
    """One per token of a chain to draft; empty where it is not drawn."""
    growth: Growth | None = field(init=False)
    """Of a tree, until it is grown."""

    def __post_init__(self) -> None:
        self.uniforms = proposal_uniforms(self.job, self.slot)
        tree = self.job.tree
        shape = None if tree is None else tree.fitted(tree.depth, self.job.num_draft_tokens)
        self.growth = None if shape is None else Growth(shape)

    def wish(self, at_once: bool) -> Wish:
        """Its next token; to begin at all, or to be made at once, it wants room for the whole proposal."""
        wants_all = at_once or not self.slot.table.blocks
        num_next = len(self.draft_ids if self.growth is None else self.growth.fed)
        num_guesses = self.job.num_draft_tokens if wants_all else num_next
        return Wish(Want.STEP, len(self.slot.committed) + num_guesses)

    def row(self) -> Row:
        """Its share of the next forward: all committed tokens and guesses that are not cached yet."""
        if self.growth is not None:
            return tree_row(self.slot, self.growth)
        slot, num_cached = self.slot, len(self.slot.cached)
        num_committed = len(slot.committed)
        new_ids = [*slot.committed[num_cached:], *self.draft_ids[max(0, num_cached - num_committed) :]]
        return Row(slot.table, new_ids, num_cached, 1, slot.cached)

    def fed(self, row: Row) -> None:
        """`row` has been through the model. What came before the first draft token was catching up."""
        self.slot.fed(row.new_ids)
        has_begun = self.draft_ids if self.growth is None else self.growth.nodes
        self.num_fed += 0 if has_begun else row.num_new

    def take_tree(self) -> None:
        """It is grown."""
        assert self.growth is not None, "no tree grows here"
        tree, laws = self.growth.tree()
        self.draft_ids, self.parents, self.unsent = list(tree.ids), list(tree.parents), list(laws)
        self.length, self.growth = len(self.draft_ids), None

    def leave(self) -> None:
        """A tree's nodes lie in the cache side by side, as in no sequence: what is accepted of them is fed again."""
        if self.job.tree is not None:
            self.slot.forget_guesses()


def proposal_uniforms(job: ProposeJob, slot: Slot) -> list[float]:
    """What each token of the proposal will be drawn with."""
    if slot.params.determined or job.tree is not None:
        return []
    start, count = len(slot.committed), job.num_draft_tokens
    params, rounds = [slot.params] * count, [start] * count
    return host_slot_uniforms(params, rounds, range(start, start + count), [Purpose.DRAFT])[0].tolist()
