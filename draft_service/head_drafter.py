"""A draft that is an EAGLE head: a model that takes the feature of the token before beside each id, and of draft tokens
its own output in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draft_service.feeding import Feeder
from draft_service.model_drafter import ModelDrafter
from outrider.engine.speculation.growth import Growth
from outrider.engine.step_plan import Row
from outrider.engine.worker.slots import Slot


class HeadDrafter(ModelDrafter):
    """Keeps the head's output after each fed node, its carry [width], as the feature of what follows."""

    def __init__(self, feeder: Feeder) -> None:
        super().__init__(feeder)
        self.can_refeed = False  # a node that is fed again needs the carry of the one before
        self._path: Any = feeder.runner.path  # a path of heads

    def _features_of(self, tree: Growth, nodes: Sequence[int]) -> Tensor:
        return torch.stack([tree.carries[tree.parents[node]] for node in nodes])

    def _note_fed(self, slot: Slot, tree: Growth, nodes: Sequence[int], row: Row, index: int) -> None:
        if tree.is_root_fed:
            slot.fed(row.new_ids)
        else:
            slot.fed_committed(row.new_ids)
        for place, node in enumerate(nodes, index):
            tree.carries[node] = self._path.hidden[place]
