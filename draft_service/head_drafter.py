"""A draft that is an EAGLE head: a model that takes the feature of the token before beside each id, and of draft tokens
its own output in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.feeding import Feeder
from draft_service.growing import Growing
from draft_service.head_slot import HeadSlot, is_fed
from draft_service.model_drafter import ModelDrafter
from outrider.engine.heads.loader import AnyHeadPath
from outrider.engine.speculation.tree import GrowingTree
from outrider.engine.step_plan import Row
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot


class HeadDrafter(ModelDrafter):
    """Keeps the head's output after the last committed token and each fed node, its *carry*, for what follows."""

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot], path: AnyHeadPath) -> None:
        """path: that of the feeder's runner."""
        super().__init__(feeder, keeper)
        self.takes_beams = False  # a node that is fed again needs the carry of the one before
        self._path = path

    def is_ready(self, asked: Growing) -> bool:
        assert asked.tree is not None, "no tree grows here"
        return (asked.tree.root.is_fed and self.knows(asked)) or is_fed(_slot(asked))

    def keep_fed(self, asked: Growing, num_fed: int, keep: Sequence[int]) -> None:
        super().keep_fed(asked, num_fed, keep)
        if asked.tree is not None and not asked.tree.root.is_fed:
            asked.slot.settle()  # what was made of carries on the way is made anew of features
            return
        slot = _slot(asked)
        start = len(slot.carries) - num_fed
        carries = [*slot.carries[:start], *(slot.carries[start + index] for index in keep)]
        num_behind = len(slot.cached) + slot.first - len(slot.committed)  # entries behind the last committed token
        slot.carries = carries[-1 - num_behind :]

    def _features_of(self, slot: Slot, parents: Sequence[int]) -> Tensor:
        assert isinstance(slot, HeadSlot), "a head's slot keeps carries"
        return torch.stack([slot.carries[parent + 1] for parent in parents])

    def _note_fed(self, slot: Slot, tree: GrowingTree, row: Row, index: int, num_nodes: int) -> None:
        assert isinstance(slot, HeadSlot), "a head's slot keeps carries"
        if tree.root.is_fed:
            slot.fed(row.new_ids)
        else:
            slot.fed_committed(row.new_ids)
            slot.carries = []
        slot.carries += self._path.hidden[index : index + num_nodes]


def _slot(asked: Growing) -> HeadSlot:
    assert isinstance(asked.slot, HeadSlot), "the slot of a head has features"
    return asked.slot
