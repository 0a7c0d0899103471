"""Runs a model over ragged rows: pieces of prompts, single tokens and K+1 positions to verify, in the same call.

Made by `loader.load_runner`, owned by the engine thread. It knows blocks and logits; slots are its callers' business.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.dense_attention import DenseCache
from outrider.engine.kv_pool import KVPool
from outrider.engine.step_plan import Row, StepPlan, group_rows
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is fixed once a model is loaded."""

    model_id: str
    vocab_size: int
    """Width of the logits."""
    context_limit: int
    """Most tokens of prompt and output together."""
    dtype: str
    """float32, bfloat16 or float16."""
    device: str
    """cpu or cuda:N."""
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    attention_path: str = "dense"


class ModelRunner:
    """A model in eval mode with its KV cache."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, pool: KVPool) -> None:
        self.facts = facts
        self.device = model.device
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self.set_pool(pool)

    def set_pool(self, pool: KVPool) -> None:
        """Begin again with an empty cache. Tables of the old pool must not be used any more."""
        num_layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        self.pool = pool
        self._cache = DenseCache(num_layers, pool.num_blocks, pool.block_size)

    def allocate(self) -> None:
        """Make the cache's storage now; without this the first request would. Raises what torch raises for memory.

        A layer's shape is known when keys of its own reach it, so one token goes through the model.
        """
        table = self.pool.new_table()
        self.forward([Row(table, [0], 0, 1)])
        table.free()

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers; 0 before the first forward."""
        return self._cache.bytes_per_token

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """-> [sum(num_logits), V] float32, rows in order, an inference tensor.

        Reserves blocks for the new tokens and writes their KV. Raises OutOfBlocks, or InvalidRequest for a token id
        outside the vocabulary or a row past the context limit; every table is then as it was.
        """
        self._check(rows)
        try:
            self._cache.copy_blocks([copy for row in rows for copy in row.table.reserve(len(row.token_ids))])
            return self._forward_groups(rows)
        except BaseException:
            for row in rows:
                row.table.truncate(row.num_cached)
            raise

    @torch.inference_mode()
    def forward_uncached(self, token_ids: Sequence[int]) -> Tensor:
        """-> [T, V] float32: the model as transformers runs it, without our cache. The truth in every test."""
        ids = torch.tensor([list(token_ids)], device=self.device)  # [1, T]
        return self._model(input_ids=ids, use_cache=False).logits[0].float()

    def _check(self, rows: Sequence[Row]) -> None:
        assert len({id(row.table) for row in rows}) == len(rows), "a table may be in a forward only once"
        for row in rows:
            assert 0 <= row.num_logits <= row.num_new and row.num_new > 0, f"row of {row.num_new} new tokens"
            assert row.table.num_tokens == row.num_cached, f"{row.table.num_tokens} stored, {row.num_cached} claimed"
            if len(row.token_ids) > self.facts.context_limit:
                raise InvalidRequest(
                    f"a row of {len(row.token_ids)} tokens is past the context limit, {self.facts.context_limit}"
                )

    def _forward_groups(self, rows: Sequence[Row]) -> Tensor:
        groups = group_rows(rows)
        if len(groups) == 1 and len({row.num_logits for row in rows}) == 1 and rows[0].num_logits:
            return self._forward_one(rows).flatten(0, 1)
        parts: list[Tensor] = [torch.empty(0, self.facts.vocab_size, device=self.device)] * len(rows)
        for group in groups:
            logits = self._forward_one([rows[i] for i in group])  # [B, M, V]
            for b, i in enumerate(group):
                parts[i] = logits[b, logits.shape[1] - rows[i].num_logits :]
        return torch.cat(parts) if parts else torch.empty(0, self.facts.vocab_size, device=self.device)

    def _forward_one(self, rows: Sequence[Row]) -> Tensor:
        """-> [B, M, V] float32 of the last M columns, M the most that a row asks for, at least 1."""
        plan = StepPlan.build(rows, self.device, self.facts.vocab_size)
        self._cache.begin(plan)
        # 0 would mean every column to transformers; one row of the head too many is the cheapest there is.
        num_kept = max(1, max(row.num_logits for row in rows))
        arguments: dict[str, Any] = {"input_ids": plan.input_ids, "attention_mask": plan.attention_mask}
        if self._takes_positions:
            arguments["position_ids"] = plan.position_ids
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_kept
        output = self._model(**arguments, past_key_values=self._cache, use_cache=True)
        return output.logits[:, -num_kept:].float()
