"""Lookahead decoding in the target: windows that are fed beside the drafts, and guesses from what came of them.

Nothing but the slot's own window fills its pool, so that nobody's speed tells of another's text.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.drafting.lookahead import Lookahead
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import Drafter
from outrider.wire.lookahead_shape import LookaheadShape
from target_service.chains import as_chain
from target_service.lease import Candidate, Scaffold
from target_service.parked import Parked, ParkedNode


class OwnLookahead:
    """Implements `StepDrafter`."""

    def __init__(self, shape: LookaheadShape, context_limit: int) -> None:
        """context_limit: most tokens of a sequence; a window near it would reach past it, and is not fed."""
        self._shape = shape
        self._most_committed = context_limit - (shape.window - 1) - (shape.ngram - 2)
        self._slots: dict[SlotKey, Lookahead] = {}

    def open(self, slot: Slot) -> None:
        source_ids = () if slot.source is None else slot.source.ids
        self._slots[slot.key] = Lookahead(self._shape, [*source_ids, *slot.committed])

    def has_next(self, slot: Slot) -> bool:
        return bool(self._slots[slot.key].guesses(slot.committed[-1]))

    def candidates(self, slot: Slot, state: SamplingState, shares: SlotShares, most: int) -> Sequence[Candidate]:
        """Return n-grams that begin alike as branches of one tree; for lenience, which is of chains, the latest."""
        known = Parked()
        for ngram in self._slots[slot.key].guesses(slot.committed[-1]):
            node = known.root
            for token_id in ngram:
                node = node.children.setdefault(token_id, ParkedNode(token_id, len(node.children)))
        return (
            known.best(shares.share, most)
            if slot.params.lenience == 1.0
            else as_chain(known.chain(most), shares.share(0))
        )

    def scaffold(self, slot: Slot, parents: Sequence[int]) -> Scaffold | None:
        shape, window = self._shape, self._slots[slot.key]
        if len(slot.committed) > self._most_committed:
            return None
        placed = [parent if parent < 0 else len(parents) + parent for parent in window.parents]
        return Scaffold(Drafter.LOOKAHEAD, window.ids, placed, len(parents), width=shape.guesses, depth=shape.ngram - 1)

    def learn(self, slot: Slot, logits: Tensor, path: Sequence[int], scaffold: Scaffold) -> None:
        best = logits[-self._shape.window :].argmax(dim=-1)  # behind the last level
        self._slots[slot.key].learn(slot.committed[-1], best.tolist())

    def cut(self, key: SlotKey, end: int) -> None:
        """Windows and pools know no positions."""

    def forget(self, key: SlotKey) -> None:
        del self._slots[key]
