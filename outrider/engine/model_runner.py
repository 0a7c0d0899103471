"""Runs a model over ragged rows: pieces of prompts, single tokens and K+1 positions to verify, in the same call.

Made by `loader.load_runner`, owned by the engine thread. It knows blocks and logits; slots are its callers' business,
and how a forward is computed is that of its path (`outrider.engine.paths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.kv_pool import KVPool
from outrider.engine.paths.forward_path import ForwardPath
from outrider.engine.step_plan import Row
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
    quantization: str = "none"
    """How the weights are quantised."""
    num_ranks: int = 1
    """Processes that the weights are split over."""


class ModelRunner:
    """A model in eval mode with its KV cache."""

    def __init__(self, path: ForwardPath, facts: ModelFacts, pool: KVPool, device: torch.device) -> None:
        self.facts = facts
        self.path = path
        self.device = device
        self.set_pool(pool)

    def set_pool(self, pool: KVPool) -> None:
        """Begin again with an empty cache. Tables of the old pool must not be used any more."""
        self.pool = pool
        self.path.set_storage(pool.num_blocks, pool.block_size)

    def allocate(self) -> None:
        """Make the cache's storage now; without this the first request would. Raises what torch raises for memory.

        A layer's shape may be known only when keys of its own reach it, so one token goes through the model.
        """
        table = self.pool.new_table()
        self.forward([Row.of(table, [0], 0, 1)])
        table.free()

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers; 0 before the first forward."""
        return self.path.kv_bytes_per_token

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """-> [sum(num_logits), V] float32, rows in order, an inference tensor.

        Reserves blocks for the new tokens and writes their KV. Raises OutOfBlocks, or InvalidRequest for a token id
        outside the vocabulary or a row past the context limit; every table is then as it was.
        """
        self._check(rows)
        try:
            self._reserve(rows)
            return self.path.forward(rows)
        except BaseException:
            for row in rows:
                row.table.truncate(row.num_cached)
            raise

    def _reserve(self, rows: Sequence[Row]) -> None:
        copies: list[tuple[int, int]] = []
        try:
            for row in rows:
                copies += row.table.reserve(row.num_tokens)
        finally:  # also when memory runs out: the tables reserved before that hold their copies already
            if copies:
                self.path.copy_blocks(copies)

    def _check(self, rows: Sequence[Row]) -> None:
        assert len({id(row.table) for row in rows}) == len(rows), "a table may be in a forward only once"
        for row in rows:
            assert 0 <= row.num_logits <= row.num_new and row.num_new > 0, f"row of {row.num_new} new tokens"
            assert row.table.num_tokens == row.num_cached, f"{row.table.num_tokens} stored, {row.num_cached} claimed"
            if row.num_tokens > self.facts.context_limit:
                raise InvalidRequest(
                    f"a row of {row.num_tokens} tokens is past the context limit, {self.facts.context_limit}"
                )


class UncachedModel:
    """The model as transformers runs it, without any cache of ours: the truth in every test."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int]) -> Tensor:
        """-> [T, V] float32."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)  # [1, T]
        return self._model(input_ids=ids, use_cache=False).logits[0].float()
