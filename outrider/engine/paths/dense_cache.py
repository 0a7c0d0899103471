"""The cache of the `dense` path: KV in the pool's blocks, gathered for transformers' own attention.

The model sees an ordinary `Cache`. Each layer writes the new tokens' KV into the blocks and hands back the whole rows,
right-aligned. Sliding-window layers keep every token too, since a ring buffer cannot roll back; the masks do the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CacheLayerMixin

from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.memory import resident
from outrider.engine.step_plan import StepPlan


class DenseLayer(CacheLayerMixin):
    """Storage of one layer, allocated when its shape is first seen (MLA has different key and value widths)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.plan: StepPlan | None = None
        self._num_blocks = num_blocks + 1  # and the trash block
        self._block_size = block_size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._new_storage(key_states), self._new_storage(value_states)
        self.is_initialized = True

    def _new_storage(self, states: Tensor) -> Tensor:
        """[num_blocks, block_size, H_kv, D] in the dtype of states [B, H_kv, q, D]."""
        shape = (self._num_blocks, self._block_size, states.shape[1], states.shape[3])
        storage = resident(torch.empty(shape, dtype=states.dtype, device=states.device))
        storage[TRASH_BLOCK].zero_()
        return storage

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[B, H_kv, q, D] new -> [B, H_kv, L, D] all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.plan is not None and self.keys is not None and self.values is not None
        return _write_and_read(self.keys, key_states, self.plan), _write_and_read(self.values, value_states, self.plan)

    def get_seq_length(self) -> int:
        """Columns before the new ones."""
        return 0 if self.plan is None else self.plan.kv_len - self.plan.num_queries

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1  # transformers' own word for "no limit"

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        for storage in (self.keys, self.values):
            if storage is not None:
                for source, destination in copies:
                    storage[destination].copy_(storage[source])

    def move_tokens(self, sources: Tensor, destinations: Tensor) -> None:
        """Both [N] int64 storage indices, on the storage's device."""
        for storage in (self.keys, self.values):
            if storage is not None:
                flat = storage.flatten(0, 1)  # [tokens, H, D], a view
                flat.index_copy_(0, destinations, flat.index_select(0, sources))

    @property
    def bytes_per_token(self) -> int:
        """0 while the shape is unknown."""
        return sum(s[0, 0].numel() * s.element_size() for s in (self.keys, self.values) if s is not None)


def _write_and_read(storage: Tensor, states: Tensor, plan: StepPlan) -> Tensor:
    """Write the new columns of states [B, H, q, D], return all columns of the rows [B, H, L, D]."""
    flat = storage.flatten(0, 1)  # [tokens, H, D], a view
    new = states.transpose(1, 2)  # [B, q, H, D]
    if plan.start is not None:
        end = plan.start + plan.kv_len
        flat[end - plan.num_queries : end].copy_(new[0])
        return flat[plan.start : end].transpose(0, 1).unsqueeze(0)
    assert plan.write_to is not None and plan.gather is not None
    columns = new.reshape(-1, *new.shape[2:])  # [B * q, H, D]
    if plan.write_from is not None:
        columns = columns.index_select(0, plan.write_from)  # [N, H, D]
    flat.index_copy_(0, plan.write_to, columns)
    gathered = flat.index_select(0, plan.gather)  # [B * L, H, D]
    return gathered.view(plan.num_rows, plan.kv_len, *gathered.shape[1:]).transpose(1, 2)


class DenseCache(Cache):
    """All layers. `begin` before every forward."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        super().__init__(layers=[DenseLayer(num_blocks, block_size) for _ in range(num_layers)])

    def begin(self, plan: StepPlan) -> None:
        for layer in self.layers:
            layer.plan = plan

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            for layer in self.layers:
                layer.copy_blocks(copies)

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int], device: torch.device) -> None:
        read, written = torch.tensor([sources, destinations], device=device)  # [N] each
        for layer in self.layers:
            layer.move_tokens(read, written)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers that have run once."""
        return sum(layer.bytes_per_token for layer in self.layers)
