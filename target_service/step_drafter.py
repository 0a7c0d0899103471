"""The protocol of drafters that live on the target's own steps: on its hidden states, or on what it says behind tokens
that they have fed beside a step's drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from target_service.lease import Candidate, Scaffold


class StepDrafter(Protocol):
    """Serves all slots that it drafts for. On the engine thread."""

    def open(self, slot: Slot) -> None:
        """Draft for a slot of which nothing is known."""

    def has_next(self, slot: Slot) -> bool:
        """Return whether there is something to say behind the last committed token."""

    def candidates(self, slot: Slot, state: SamplingState, shares: SlotShares, most: int) -> Sequence[Candidate]:
        """Return at most so many drafts, best first. Asked where there is something to say."""

    def scaffold(self, slot: Slot, parents: Sequence[int]) -> Scaffold | None:
        """Return what is to be fed beside the drafts of the slot's next step, each of which follows the one at that
        index; None for nothing. What hangs under the first of them comes first: they may be all that is fed.
        """

    def learn(self, slot: Slot, logits: Tensor, path: Sequence[int], scaffold: Scaffold) -> None:
        """Take what the target says behind the scaffold, logits [S, V] float32, before anything is committed. path: the
        drafts that stay.
        """

    def cut(self, key: SlotKey, end: int) -> None:
        """Forget what is known of a slot's tokens from that position on: they are gone, or others."""

    def forget(self, key: SlotKey) -> None:
        """Draft for a slot no more."""
