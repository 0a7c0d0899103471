"""The `paged` path: transformers' own modules over packed tokens, with our attention and a block table.

Rows of different widths share one forward without padding. It runs every class whose attention function can be
replaced. `GraphedPath` runs it on a GPU, with flash attention.
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
    """Attention path that runs transformers' modules over packed rows: the new tokens of all rows are concatenated,
    without padding. Implements `ForwardPath`, `TreePath` and `FeaturePath`.
    """

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
        """Prepare the model for packed rows. Raises PathUnavailable for a model that cannot run in this way.

        vocab_size: number of logits at a position. attention: the attention over blocks; None = `TorchAttention`.
        num_ids: number of token ids that may be fed; None = vocab_size.
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
        if self._cache is None:
            return 0
        return self._cache.bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._cache = None  # free the old storage first: memory may not suffice for both
        self._cache = PagedCache(self._text_config, self._attention, num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._cache is not None
        self._cache.copy_blocks(copies)

    def move_tokens(self, from_indices: Sequence[int], to_indices: Sequence[int]) -> None:
        assert self._cache is not None
        self._cache.move_tokens(from_indices, to_indices, self._model.device)

    def set_taps(self, taps: Sequence[int]) -> None:
        self._taps.set(taps)
        self.features = torch.empty(0)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        assert self._cache is not None
        if not rows:
            self.features = self.features[:0]
            return torch.empty(0, self._vocab_size, device=self._model.device)
        plan = PagedPlan.build(rows, self._model.device, self._num_ids, needs_gather=self._cache.needs_gather)
        logits, features = self.run(plan)
        if features is not None:
            self.features = features
        return logits

    def run(self, plan: PagedPlan) -> tuple[Tensor, Tensor | None]:
        """Run a plan. Return the logits [N, V] float32 at the N positions in plan.logits_at, and the tapped hidden
        states of all T tokens, [T, taps, H]. The second is None if there are no taps.
        """
        logits: Tensor = self.outputs(plan).logits[0]  # [N, V], or [T, V] of a class that computes all
        if not self._takes_logits_to_keep:
            logits = logits.index_select(0, plan.logits_at)
        features = self._taps.pop()  # [1, T, taps, H]
        if features is not None:
            features = features[0]
        return logits[: plan.logits_at.shape[0]].float(), features

    def outputs(self, plan: PagedPlan, **more: Any) -> Any:
        """Run the model over a plan. Return the model's output object. more: additional inputs of the model by name."""
        assert self._cache is not None
        arguments: dict[str, Any] = {"input_ids": plan.input_ids, "position_ids": plan.position_ids, **more}
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = plan.logits_at
            if not plan.logits_at.shape[
                0
            ]:  # some classes keep every position then; one row of the head is the cheapest
                arguments["logits_to_keep"] = 1
        with self._cache.running(plan), attention_of(self._model, ATTENTION_NAME):
            return self._model(**arguments, past_key_values=self._cache, use_cache=True)


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Context manager within which the model's attention is computed by the attention function of this name. Outside of
    it, as in the self-test, the same model uses transformers' own function.
    """
    previous = model.config._attn_implementation
    model.config._attn_implementation = name  # what set_attn_implementation sets, without its walk over all modules
    try:
        yield
    finally:
        model.config._attn_implementation = previous
