"""The path of a head: the paged one, whose rows bring features and whose forward leaves carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.paths.paged import PagedPath
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest


class HeadPath(PagedPath):
    """Runs an EAGLE-3 head over rows of entries. Implements `ForwardPath` and `RunsTrees`.

    Each row has `features`. A token's index in the row is its index among the entries, from 0 on.
    """

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__(head, head.facts.vocab_size)
        self.head = head
        self.carries = torch.empty(0, head.facts.width)
        """[sum(num_logits), d] of the last forward, in the head's dtype on its device, rows in order."""

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage and allocate it: unlike a model's, its shape is known."""
        super().set_storage(num_blocks, block_size)
        assert self._cache is not None
        facts = self.head.facts
        nothing = torch.empty(1, facts.num_kv_heads, 0, facts.head_dim, dtype=self.head.dtype, device=self.head.device)
        for layer in self._cache.layers:
            layer.lazy_initialization(nothing, nothing)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `carries`.

        Raises InvalidRequest for a row without a feature of the head's width for each new token.
        """
        assert self._cache is not None
        head = self.head
        if not rows:
            self.carries = torch.empty(0, head.facts.width, dtype=head.dtype, device=head.device)
            return torch.empty(0, head.facts.vocab_size, device=head.device)
        features = torch.cat([_features(row, head.facts.width).to(head.device, head.dtype) for row in rows])  # [T, d]
        plan = PagedPlan.build(rows, head.device, head.facts.vocab_size)
        output = self.outputs(plan, features=features[None])
        num_wanted = plan.logits_at.shape[0]
        self.carries = output.carries[0, :num_wanted]
        logits: Tensor = output.logits[0, :num_wanted].float()
        return logits


def _features(row: Row, width: int) -> Tensor:
    if row.features is None or row.features.shape != (row.num_new, width):
        shape = None if row.features is None else list(row.features.shape)
        raise InvalidRequest(f"a row of {row.num_new} tokens has features {shape}, must be [{row.num_new}, {width}]")
    return row.features
