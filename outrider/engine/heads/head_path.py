"""The paths of a head: rows bring features and a forward leaves carries. Here the paged one; `fused_head` has ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.heads.carry_head import CarryHead
from outrider.engine.heads.head_network import HeadNetwork
from outrider.engine.paths.forward_path import ForwardPath, RunsTrees
from outrider.engine.paths.paged import PagedPath
from outrider.engine.paths.paged_cache import PagedCache
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest


class RunsHead(ForwardPath, RunsTrees, Protocol):
    """Runs a head over rows of entries, each of which has `features`.

    A token's index in the row is its index among the entries, from 0 on.
    """

    @property
    def head(self) -> CarryHead:
        """The network; what is decided or changed of it is so from the next forward on."""

    carries: Tensor
    """[sum(num_logits), d] of the last forward, in the head's dtype on its device, rows in order."""


class HeadPath(PagedPath):
    """Runs the head's own modules. Implements `RunsHead`."""

    def __init__(self, head: CarryHead) -> None:
        super().__init__(head, head.facts.vocab_size)
        self.head = head
        self.carries = torch.empty(0, head.facts.width)

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage and allocate it: unlike a model's, its shape is known."""
        super().set_storage(num_blocks, block_size)
        assert self._cache is not None
        allocate(self._cache, self.head)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `carries`.

        Raises InvalidRequest for a row without a feature of the head's width for each new token.
        """
        assert self._cache is not None
        head = self.head
        if not rows:
            self.carries = torch.empty(0, head.facts.width, dtype=head.dtype, device=head.device)
            return torch.empty(0, head.facts.vocab_size, device=head.device)
        features = torch.cat([to_device(features_of(row, head), head.device).to(head.dtype) for row in rows])  # [T, d]
        plan = PagedPlan.build(rows, head.device, head.facts.vocab_size, gathers=self._cache.gathers)
        output = self.outputs(plan, features=features[None])
        num_wanted = plan.logits_at.shape[0]
        self.carries = output.carries[0, :num_wanted]
        logits: Tensor = output.logits[0, :num_wanted].float()
        return logits


def allocate(cache: PagedCache, head: HeadNetwork) -> None:
    """Allocate all layers of a head's cache."""
    for layer, shapes in zip(cache.layers, head.kv_shapes, strict=True):
        layer.lazy_initialization(*(head.lm_head.weight.new_empty(1, heads, 0, width) for heads, width in shapes))


def features_of(row: Row, head: CarryHead) -> Tensor:
    """Return the row's features [num_new, d]. Raises InvalidRequest where it has others, or none."""
    wanted = (row.num_new, head.facts.width)
    if row.features is None or row.features.shape != wanted:
        shape = None if row.features is None else list(row.features.shape)
        raise InvalidRequest(f"a row of {row.num_new} tokens has features {shape}, must be {list(wanted)}")
    return row.features
