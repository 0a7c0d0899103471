"""The protocol of the target's own drafters: tables, heads, predictions, and those that add extra rows to a step."""

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
    """E rows that a drafter adds to a step, after its draft tokens, because it needs the logits after them.

    They are never verified and do not stay in the cache. The drafter makes draft tokens for later steps from their
    logits.

    Example: in a step with draft tokens 0 and 1, `parents` is [-1, 2]. The first extra row then follows the last
    committed token, and the second follows the first.
    """

    drafter: Drafter
    ids: Sequence[int]
    """Token id of each extra row, [E]."""
    parents: Sequence[int]
    """Index of the token that each extra row follows, [E]; ROOT for the last committed token. The step's draft tokens
    are counted first, then the extra rows."""
    width: int
    """Maximum number of alternative draft tokens after one token that these rows give to a later step."""
    depth: int
    """Maximum depth of the draft tokens that these rows give to a later step."""

    def gain(self, acceptance: SlotAcceptance) -> float:
        """Return the expected number of accepted draft tokens that the rows bring. acceptance: acceptance probabilities
        of their drafter.
        """
        prob = min(1.0, sum(map(acceptance.prob, range(self.width))))
        gain = 0.0
        for _ in range(self.depth):
            gain = prob * (1.0 + gain)
        return gain


class TargetDrafter(Protocol):
    """Drafter in the target, for all slots that were opened for it. Runs on the engine thread.

    `append` is called after a step that committed further tokens of a slot, `commit` after a slot's committed tokens
    were replaced. `extra_rows` and `read` are for drafters with `has_extra_rows`. Methods with a body in this class are
    optional.
    """

    max_len: int = MAX_DRAFT_TOKENS
    """Maximum number of draft tokens that the drafter proposes at once."""
    has_extra_rows: bool = False
    """Whether the drafter may add extra rows to a step."""

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Begin to draft for a new slot."""
        return

    def commit(self, slot: Slot, num_same: int) -> None:
        """Update the drafter's state of a slot after the slot's committed tokens were replaced. num_same: number of
        committed tokens, from the first on, that are as they were.
        """
        return

    def append(self, slot: Slot, token_ids: Sequence[int]) -> Sequence[bool]:
        """Update the drafter's state of a slot after a step that committed `token_ids`.

        The drafter of a prediction returns whether its proposals for these tokens were right: one entry for each token
        for which it had a proposal, verified or not. Other drafters return nothing.
        """
        return ()

    def has_next(self, slot: Slot) -> bool:
        """Return whether the drafter can propose, after the slot's last committed token, draft tokens that are likely
        enough to be worth verifying.
        """

    def propose(self, slot: Slot, state: SamplingState, acceptance: SlotAcceptance, max_tokens: int) -> CandidateTree:
        """Return at most max_tokens draft tokens, best first; an empty tree if there is nothing to propose.

        state: sampling state of the slot. acceptance: acceptance probabilities of this drafter in the slot.
        """

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        """Release the drafter's state of a slot. is_ended: whether the slot's output is complete, so that the drafter
        may propose its tokens to other slots.
        """

    def extra_rows(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return the extra rows to add to the slot's next step; None if there are none.

        parents: for each draft token of the step, the index of its parent among them, or ROOT. The method is called
        twice in a step: with all draft tokens that the step might verify, and then with those that it does verify,
        which are the first of these.
        """
        return None

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        """Make draft tokens for later steps from the logits after the extra rows, [E, V] float32. It is called before
        anything of the step is committed. path: nodes of the step's draft tokens that were accepted. rows: the extra
        rows.
        """
        return
