"""Lookahead decoding in the target: windows that are fed beside the drafts, and guesses from what came of them.

Nothing but the slot's own window fills its pool, so that nobody's speed tells of another's text.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.drafting.lookahead import Lookahead
from outrider.engine.cuda.host_copy import DeferredCopies
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.drafters import Drafter
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
        self._last_ids: dict[SlotKey, int] = {}
        """Of slots whose windows have not learnt yet what the last step said: the token that it was said behind."""
        self._best = DeferredCopies[SlotKey]()
        """What it said."""

    def open(self, slot: Slot) -> None:
        self._last_ids.pop(slot.key, None)
        source_ids = () if slot.source is None else slot.source.ids
        self._slots[slot.key] = Lookahead(self._shape, [*source_ids, *slot.committed])

    def has_next(self, slot: Slot) -> bool:
        return bool(self._window(slot.key).guesses(slot.committed[-1]))

    def candidates(self, slot: Slot, state: SamplingState, shares: SlotShares, most: int) -> Sequence[Candidate]:
        """Return n-grams that begin alike as branches of one tree; for lenience, which is of chains, the latest."""
        known = Parked()
        for ngram in self._window(slot.key).guesses(slot.committed[-1]):
            node = known.root
            for token_id in ngram:
                node = node.children.setdefault(token_id, ParkedNode(token_id, len(node.children)))
        return (
            known.best(shares.share, most)
            if slot.params.lenience == 1.0
            else as_chain(known.chain(most), shares.share(0))
        )

    def scaffold(self, slot: Slot, parents: Sequence[int]) -> Scaffold | None:
        shape, window = self._shape, self._window(slot.key)
        if len(slot.committed) > self._most_committed:
            return None
        placed = [parent if parent < 0 else len(parents) + parent for parent in window.parents]
        return Scaffold(Drafter.LOOKAHEAD, window.ids, placed, len(parents), width=shape.guesses, depth=shape.ngram - 1)

    def learn(self, slot: Slot, logits: Tensor, path: Sequence[int], scaffold: Scaffold) -> None:
        self._last_ids[slot.key] = slot.committed[-1]
        self._best.add(slot.key, logits[-self._shape.window :].argmax(dim=-1))  # behind the last level

    def cut(self, key: SlotKey, end: int) -> None:
        """Windows and pools know no positions."""

    def forget(self, key: SlotKey) -> None:
        del self._slots[key]
        self._last_ids.pop(key, None)
        self._best.drop(key)

    def _window(self, key: SlotKey) -> Lookahead:
        """Return a slot's window, which has learnt what the last step said."""
        last_id = self._last_ids.pop(key, None)
        if last_id is not None:
            best = self._best.get(key)
            assert best is not None, "a step has said nothing"
            self._slots[key].learn(last_id, best.tolist())
        return self._slots[key]
