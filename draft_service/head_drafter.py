"""A draft that is an EAGLE head: a model that takes the target's row of the token before beside each id, and of guesses
its own output in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.feeding import Feeder
from draft_service.growing import Growing
from draft_service.head_slot import HeadSlot
from draft_service.model_drafter import ModelDrafter
from outrider.engine.heads.head_path import RunsHead
from outrider.engine.speculation.growth import Growth
from outrider.engine.step_plan import Row
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot


class HeadDrafter(ModelDrafter):
    """Each fed node keeps the head's output after it, its *carry* [width], for what follows."""

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot], path: RunsHead) -> None:
        """path: that of the feeder's runner."""
        super().__init__(feeder, keeper)
        self.can_refeed = False  # a node that is fed again needs the carry of the one before
        self._path = path

    def is_ready(self, asked: Growing) -> bool:
        slot, tree = asked.slot, asked.tree
        assert isinstance(slot, HeadSlot), "a head's slot takes rows"
        if tree.is_root_fed and self.knows(asked):
            return True
        return len(slot.committed) > slot.first and not slot.lacks_rows and super().is_ready(asked)

    def keep_fed(self, asked: Growing, num_fed: int, keep: Sequence[int]) -> None:
        super().keep_fed(asked, num_fed, keep)
        if not asked.tree.is_root_fed:
            asked.slot.settle()  # what was made of carries on the way is made anew of rows

    def _features_of(self, tree: Growth, nodes: Sequence[int]) -> Tensor:
        return torch.stack([tree.states[tree.parents[node]] for node in nodes])

    def _note_fed(self, slot: Slot, tree: Growth, nodes: Sequence[int], row: Row, index: int) -> None:
        if tree.is_root_fed:
            slot.fed(row.new_ids)
        else:
            slot.fed_committed(row.new_ids)
        for place, node in enumerate(nodes):
            tree.states[node] = self._path.carries[index + place]
