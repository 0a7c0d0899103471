"""The protocol of drafters in the target: tables, heads, predictions, and those that have rows fed beside a step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import MAX_DRAFT_TOKENS


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
    width: int
    """Most draft tokens of a later step that follow the same token."""
    depth: int
    """Most that follow each other."""

    def gain(self, shares: SlotShares) -> float:
        """Return the tokens a step that they are expected to bring, by how often the drafter's are accepted."""
        prob = min(1.0, sum(map(shares.share, range(self.width))))
        gain = 0.0
        for _ in range(self.depth):
            gain = prob * (1.0 + gain)
        return gain


class TargetDrafter(Protocol):
    """Proposes draft tokens for all slots that it was opened for. Runs on the engine thread.

    Its methods are called at every change of a slot's committed tokens. `rows_beside` and `read` are for drafters that
    have rows fed beside a step's. Methods that return something here are those that a drafter may leave out.
    """

    max_len: int = MAX_DRAFT_TOKENS
    """Most draft tokens that it proposes."""
    feeds_rows: bool = False
    """Whether it has rows fed beside a step's draft tokens."""

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Begin to draft for a slot, of which nothing is known."""
        return

    def commit(self, slot: Slot, num_same: int) -> None:
        """Follow a slot whose committed tokens were set: the first num_same of them are those from before."""
        return

    def append(self, slot: Slot, token_ids: Sequence[int]) -> Sequence[bool]:
        """Follow a slot that a step has committed these tokens of. Returns, for those in whose place the drafter had
        something to propose, verified or not, whether it was right, where it counts that itself.
        """
        return ()

    def has_next(self, slot: Slot) -> bool:
        """Return whether what it proposes after the last committed token is worth verifying."""

    def propose(self, slot: Slot, state: SamplingState, shares: SlotShares, max_tokens: int) -> CandidateTree:
        """Return at most max_tokens draft tokens, best first; an empty tree where it has nothing to propose."""

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        """Forget a slot. is_ended: its sequence is complete and sound, and may be remembered for others."""

    def rows_beside(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return what the next step is to feed beside draft tokens with these parents; None for nothing. It is called
        with all that the step might verify, and again with the first of them that it does.
        """
        return None

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        """Read the logits [R, V] float32 after the rows, before anything is committed. path: the accepted nodes."""
        return
