"""The `paged` path: transformers' own modules over packed tokens, with our attention and a block table.

Rows of any widths share one forward without padding. Runs every class whose attention can be replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.architectures.layer_memory import layer_types, packing_refusal
from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.attention.module_taps import ModuleTaps
from outrider.engine.attention.paged_attention import TorchAttention
from outrider.engine.attention.paged_cache import ATTENTION_NAME, PagedCache
from outrider.engine.attention.paged_plan import PagedAttention, PagedPlan
from outrider.engine.errors import PathUnavailable
from outrider.engine.step_plan import Row


class PagedPath:
    """Runs transformers' modules over packed rows. Implements `ForwardPath`."""

    name = "paged"
    batch_invariant = False
    block_size = BLOCK_SIZE

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        attention: PagedAttention | None = None,
        *,
        num_ids: int | None = None,
    ) -> None:
        """Prepare the model for packed rows. Raises PathUnavailable.

        attention: the attention over blocks; None takes torch's own, row by row. num_ids: that may be fed; None: those
        of the vocabulary.
        """
        reason = packing_refusal(layer_types(model.config))
        if reason is not None:
            raise PathUnavailable(reason)
        if not model._supports_attention_backend:
            raise PathUnavailable("its attention cannot be replaced")
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise PathUnavailable("takes no positions")
        self._model = model
        self._vocab_size = vocab_size
        self._num_ids = num_ids or vocab_size
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._attention = attention or TorchAttention()
        self._text_config = model.config.get_text_config(decoder=True)
        self._cache: PagedCache | None = None
        self._taps = ModuleTaps(model)
        self.features = torch.empty(0)

    @property
    def kv_bytes_per_token(self) -> int:
        return 0 if self._cache is None else self._cache.bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._cache = None  # the old storage goes before the new one comes
        self._cache = PagedCache(self._text_config, self._attention, num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._cache is not None
        self._cache.copy_blocks(copies)

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        assert self._cache is not None
        self._cache.move_tokens(sources, destinations, self._model.device)

    def set_taps(self, taps: Sequence[int]) -> None:
        self._taps.set(taps)
        self.features = torch.empty(0)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        assert self._cache is not None
        if not rows:
            self.features = self.features[:0]
            return torch.empty(0, self._vocab_size, device=self._model.device)
        plan = PagedPlan.build(rows, self._model.device, self._num_ids, gathers=self._cache.gathers)
        logits, features = self.run(plan)
        if features is not None:
            self.features = features
        return logits

    def run(self, plan: PagedPlan) -> tuple[Tensor, Tensor | None]:
        """Return the logits [N, V] float32 of the N positions in plan.logits_at, and the features of all [T, taps, H].

        features: None where nothing is tapped.
        """
        logits: Tensor = self.outputs(plan).logits[0]
        if not self._takes_logits_to_keep:
            logits = logits.index_select(0, plan.logits_at)
        features = self._taps.take()  # [1, T, taps, H]
        return logits[: plan.logits_at.shape[0]].float(), None if features is None else features[0]

    def outputs(self, plan: PagedPlan, **more: Any) -> Any:
        """Return what the model returns of a plan and of `more`, its further inputs."""
        assert self._cache is not None
        arguments: dict[str, Any] = {"input_ids": plan.input_ids, "position_ids": plan.position_ids, **more}
        if self._takes_logits_to_keep:
            # Keeping no position means keeping every one to some classes; one row of the head is the cheapest.
            arguments["logits_to_keep"] = plan.logits_at if plan.logits_at.shape[0] else 1
        with self._cache.running(plan), attention_of(self._model, ATTENTION_NAME):
            return self._model(**arguments, past_key_values=self._cache, use_cache=True)


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch the attention for one call: the same model also computes the self-test's truth in its own way."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name  # as set_attn_implementation does in the end, without its walk
    try:
        yield
    finally:
        model.config._attn_implementation = before
