"""The protocol of drafters in the target: tables, heads, predictions, and those that have rows fed beside a step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import Candidates, DraftSource
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import Drafter


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Tokens that a drafter has a step feed beside its draft tokens, to read the logits after them. They are never
    verified and never stay in the cache: they bring draft tokens of later steps.
    """

    drafter: Drafter
    ids: Sequence[int]
    parents: Sequence[int]
    """Index of the token that each follows, the step's draft tokens counted before these; ROOT: the last committed
    token."""
    num_drafts: int
    """Draft tokens of the step."""
    gain: float
    """Tokens a step that they are expected to bring."""


class TargetDrafter(Protocol):
    """Proposes draft tokens for all slots that it was opened for. Runs on the engine thread.

    It hears of every change of a slot's committed tokens. The last methods are for those that live on the steps
    themselves; others leave them as they are.
    """

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Begin to draft for a slot, of which nothing is known."""

    def commit(self, slot: Slot, num_same: int) -> None:
        """Follow a slot whose committed tokens were set: the first num_same of them are those from before."""

    def append(self, slot: Slot, token_ids: Sequence[int]) -> Sequence[bool]:
        """Follow a slot that a step has committed these tokens of. Returns, for those in whose place the drafter had
        something to propose, verified or not, whether it was right, where it counts that itself.
        """
        return ()

    def has_next(self, slot: Slot) -> bool:
        """Return whether what it proposes after the last committed token is worth verifying."""

    def propose(self, slot: Slot, state: SamplingState, source: DraftSource, max_tokens: int) -> Candidates:
        """Return at most max_tokens draft tokens, best first; none where it has nothing to propose."""

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        """Forget a slot. is_ended: its sequence is complete and sound, and may be remembered for others."""

    def rows_beside(self, slot: Slot, parents: Sequence[int], source: DraftSource) -> ExtraRows | None:
        """Return what the next step is to feed beside draft tokens with these parents; None for nothing. It is called
        with all that the step might verify, and again with the first of them that it does.
        """
        return None

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        """Read the logits [R, V] float32 after the rows, before anything is committed. path: the accepted nodes."""
        return None


def expected_tokens(prob: float, depth: int) -> float:
    """Return the tokens of a chain that are accepted, each with the same probability if those before it are."""
    prob = min(1.0, prob)
    total = 0.0
    for _ in range(depth):
        total = prob * (1.0 + total)
    return total
