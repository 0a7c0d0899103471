"""The `dense` path: transformers' own modules, masks and attention over rows right-aligned. Runs everything."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.paths.dense_cache import DenseCache
from outrider.engine.paths.dense_masks import TreeMasks
from outrider.engine.paths.forward_path import BLOCK_SIZE
from outrider.engine.step_plan import Row, StepPlan, group_rows


class DensePath:
    """Implements `ForwardPath`."""

    name = "dense"
    batch_invariant = False
    block_size = BLOCK_SIZE

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._masks = TreeMasks(model.config.get_text_config(decoder=True), takes_positions=self._takes_positions)
        self._cache: DenseCache | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return 0 if self._cache is None else self._cache.bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._cache = DenseCache(self._num_layers, num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._cache is not None
        self._cache.copy_blocks(copies)

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        assert self._cache is not None
        self._cache.move_tokens(sources, destinations, self._model.device)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        groups = group_rows(rows)
        if len(groups) == 1 and len({row.num_logits for row in rows}) == 1 and rows[0].num_logits:
            return self._forward_one(rows).flatten(0, 1)
        device = self._model.device
        parts: list[Tensor] = [torch.empty(0, self._vocab_size, device=device)] * len(rows)
        for group in groups:
            logits = self._forward_one([rows[i] for i in group])  # [B, M, V]
            for b, i in enumerate(group):
                parts[i] = logits[b, logits.shape[1] - rows[i].num_logits :]
        return torch.cat(parts) if parts else torch.empty(0, self._vocab_size, device=device)

    def _forward_one(self, rows: Sequence[Row]) -> Tensor:
        """-> [B, M, V] float32 of the last M columns, M the most that a row asks for, at least 1."""
        assert self._cache is not None
        plan = StepPlan.build(rows, self._model.device, self._vocab_size)
        self._cache.begin(plan)
        # 0 would mean every column to transformers; one row of the head too many is the cheapest there is.
        num_kept = max(1, max(row.num_logits for row in rows))
        arguments: dict[str, Any] = {"input_ids": plan.input_ids, "attention_mask": plan.attention_mask}
        if any(row.parents is not None for row in rows):
            arguments["attention_mask"] = self._masks.of(rows, plan, self._model.dtype)
        if self._takes_positions:
            arguments["position_ids"] = plan.position_ids
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_kept
        output = self._model(**arguments, past_key_values=self._cache, use_cache=True)
        return output.logits[:, -num_kept:].float()
