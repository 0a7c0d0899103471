"""The protocol of the target's own drafters: tables, heads, predictions, and those with rows beside a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """E rows that a drafter has fed beside a step's draft tokens, to read the logits after them.

    They are never verified and do not stay in the cache: they bring draft tokens of later steps.

    A step with draft tokens 0 and 1, parents [-1, 2]: the first row follows the last committed token, and the second
    row the first.
    """

    drafter: Drafter
    ids: Sequence[int]
    """Token ids, [E]."""
    parents: Sequence[int]
    """Index of the token that each row follows, [E], where rows are counted behind the step's draft tokens; ROOT for
    the last committed token."""
    width: int
    """Maximum number of a later step's draft tokens after one token."""
    depth: int
    """Maximum depth of a later step's draft tokens."""

    def gain(self, shares: SlotAcceptance) -> float:
        """Return the expected number of accepted draft tokens that the rows bring. shares: of their drafter."""
        prob = min(1.0, sum(map(shares.share, range(self.width))))
        gain = 0.0
        for _ in range(self.depth):
            gain = prob * (1.0 + gain)
        return gain


class TargetDrafter(Protocol):
    """One of the target's own drafters, for all slots that were opened for it. Runs on the engine thread.

    `commit` or `append` is called at every change of a slot's committed tokens. `rows_beside` and `read` are for
    drafters with `feeds_rows`. Methods with a body here are optional.
    """

    max_len: int = MAX_DRAFT_TOKENS
    """Maximum number of draft tokens that it proposes."""
    feeds_rows: bool = False
    """Whether it has rows fed beside a step's draft tokens."""

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Begin to draft for a new slot."""
        return

    def commit(self, slot: Slot, num_same: int) -> None:
        """Follow a slot whose committed tokens were replaced. num_same: tokens at their beginning that stay as they
        were.
        """
        return

    def append(self, slot: Slot, token_ids: Sequence[int]) -> Sequence[bool]:
        """Follow a slot of which a step has committed these tokens.

        A prediction returns whether it was right, for each token for which it had a proposal, verified or not; other
        drafters return nothing.
        """
        return ()

    def has_next(self, slot: Slot) -> bool:
        """Return whether its proposal after the last committed token is worth verifying."""

    def propose(self, slot: Slot, state: SamplingState, shares: SlotAcceptance, max_tokens: int) -> CandidateTree:
        """Return at most max_tokens draft tokens, best first; an empty tree where there is no proposal."""

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        """Forget a slot. is_ended: its output is complete, and may be remembered for other slots."""

    def rows_beside(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return the rows that the next step is to feed beside draft tokens with these parents; None for none.

        It is called with all draft tokens that the step might verify, and again with the first ones, which it verifies.
        """
        return None

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        """Read the logits [E, V] float32 after the rows, before anything is committed. path: the accepted nodes."""
        return
