"""A proposal being drafted: what it has so far, and what it will draw with."""

from __future__ import annotations

from dataclasses import dataclass, field

from draft_service.jobs import ProposeJob
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
Drawn = tuple[int, Law | None]
"""A token and what it was drawn from; None where proposals are ids alone."""


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
    unsent: list[Law] = field(default_factory=list)
    """What drafted tokens that have not been sent yet were drawn from."""
    num_sent: int = 0
    payload: Payload = field(default_factory=Payload)
    started_s: float | None = None
    num_fed: int = 0
    length: int | None = None
    """Tokens that it ends with, once that is known to be before all that were asked for."""

    @property
    def position(self) -> int:
        """Of its next token in the sequence."""
        return len(self.slot.committed) + len(self.draft_ids)

    @property
    def determined(self) -> bool:
        """Its tokens are guesses of what the target says, and travel as ids alone."""
        return self.slot.params.determined

    @property
    def done(self) -> bool:
        return len(self.draft_ids) >= self.num_announced

    @property
    def num_announced(self) -> int:
        """Tokens that it will have, as far as is known."""
        return self.job.num_draft_tokens if self.length is None else self.length

    def take(self, drawn: Drawn) -> None:
        """Its next token, and what that was drawn from."""
        token_id, law = drawn
        self.draft_ids.append(token_id)
        if law is not None:
            self.unsent.append(law)


@dataclass(slots=True)
class Active(Asked):
    """One that a model makes."""

    slot: Slot
    uniforms: list[float] = field(init=False)
    """One per token to draft; empty where it is not drawn."""

    def __post_init__(self) -> None:
        self.uniforms = proposal_uniforms(self.job, self.slot)

    def wish(self, at_once: bool) -> Wish:
        """Its next token; to begin at all, or to be made at once, it wants room for the whole proposal."""
        wants_all = at_once or not self.slot.table.blocks
        num_guesses = self.job.num_draft_tokens if wants_all else len(self.draft_ids)
        return Wish(Want.STEP, len(self.slot.committed) + num_guesses)

    def row(self) -> Row:
        """Its share of the next forward: all committed tokens and guesses that are not cached yet."""
        slot, num_cached = self.slot, len(self.slot.cached)
        num_committed = len(slot.committed)
        new_ids = [*slot.committed[num_cached:], *self.draft_ids[max(0, num_cached - num_committed) :]]
        return Row(slot.table, new_ids, num_cached, 1, slot.cached)

    def fed(self, row: Row) -> None:
        """`row` has been through the model. What came before the first draft token was catching up."""
        self.slot.fed(row.new_ids)
        self.num_fed += 0 if self.draft_ids else row.num_new


def proposal_uniforms(job: ProposeJob, slot: Slot) -> list[float]:
    """What each token of the proposal will be drawn with."""
    if slot.params.determined:
        return []
    start, count = len(slot.committed), job.num_draft_tokens
    params, rounds = [slot.params] * count, [start] * count
    return host_slot_uniforms(params, rounds, range(start, start + count), [Purpose.DRAFT])[0].tolist()
