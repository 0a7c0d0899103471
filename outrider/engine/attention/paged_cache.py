"""The `paged` path inside transformers' modules: a cache that writes into blocks, and an attention function.

The function is registered under a name that has no mask builder, so transformers makes no mask; the attention backend
applies causality, windows and chunks. The function finds the blocks through the cache that is running on its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from outrider.engine.attention.block_cache import BlockCache, BlockLayer, layer_limits
from outrider.engine.attention.paged_plan import AttentionOptions, PagedAttention, PagedPlan

ATTENTION_NAME = "outrider_paged"
"""Name under which `paged_attention_forward` is registered with transformers."""


class _Running(threading.local):
    cache: PagedCache | None = None


_running = _Running()


class PagedLayer(BlockLayer):
    """Layer of the `paged` path's cache: it writes new states into the blocks and returns them to the model. The
    attention function reads the blocks itself.
    """

    def __init__(self, num_blocks: int, block_size: int, needs_gather: bool) -> None:
        """needs_gather: whether `update` returns the states of all rows' tokens, cached and new, in one line, [1, H, S,
        D], instead.
        """
        super().__init__(num_blocks, block_size)
        self.returned_keys: Tensor | None = None
        """Keys that the last `update` returned to the model. If the attention function gets a different tensor, the
        model has changed the keys in between, and is refused."""
        self._needs_gather = needs_gather

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the forward's T new tokens, [1, H, T, D] each. Return the keys and values that
        the model passes on to the attention function.
        """
        self.returned_keys, values = super().update(key_states, value_states)
        return self.returned_keys, values

    def write_and_read(self, storage: Tensor, states: Tensor) -> Tensor:
        """Write the states [1, H, T, D] of the forward's T new tokens into a storage. Return these states or, if the
        layer was created with `needs_gather`, those of all S tokens of the sequences, cached and new, [1, H, S, D].
        """
        flat = storage.flatten(0, 1)  # [tokens, H, D], a view
        flat.index_copy_(0, self.plan.write_to, states[0].transpose(0, 1))
        if not self._needs_gather:
            return states
        return flat.index_select(0, self.plan.gather).transpose(0, 1).unsqueeze(0)

    def get_seq_length(self) -> int:
        """Return 0 for transformers, without effect: this path passes all positions itself."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return a mask's number of columns and first index for transformers, without effect: masks are not used."""
        return query_length, 0


class PagedCache(BlockCache):
    """KV cache of the `paged` path. A forward must run inside `running(plan)`."""

    def __init__(self, config: PreTrainedConfig, attention: PagedAttention, num_blocks: int, block_size: int) -> None:
        """Read each layer's limits. Storage is allocated at the first forward.

        config: the text model's configuration. attention: the attention backend. num_blocks: number of blocks without
        the trash block. block_size: number of tokens in a block.
        """
        self.needs_gather = getattr(config, "kv_lora_rank", None) is not None
        """Whether layers return to the model the states of all tokens of the sequences, cached and new. True for latent
        attention (MLA), where the model computes keys from cached latents. False = layers return the states of the new
        tokens alone."""
        num_layers = config.num_hidden_layers
        super().__init__(layers=[PagedLayer(num_blocks, block_size, self.needs_gather) for _ in range(num_layers)])
        self._attention = attention
        self._limits = [layer_limits(config, index) for index in range(num_layers)]

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return, for each of the forward's N new tokens, its position minus its index among them: [N] int64. Called by
        Llama 4's layers, whose attention has a temperature by position: they add the indices to get positions.

        layer_idx: index of the layer. None = the whole model, for which the result is 0: transformers asks for it, but
        uses the positions that this path passes.
        """
        # two rows at positions 4, 5 and 9: columns 0, 1, 2, so [4, 4, 7]
        if layer_idx is None:
            return 0
        plan = self.layers[layer_idx].plan
        if plan is None:
            return 0
        positions = plan.position_ids[0]  # [N]
        return positions - torch.arange(positions.shape[0], device=positions.device)

    @contextmanager
    def running(self, plan: PagedPlan) -> Iterator[None]:
        """Context manager within which the attention function of this thread uses this cache and this plan."""
        self.begin(plan)
        self._attention.begin(plan)
        _running.cache = self
        try:
            yield
        finally:
            _running.cache = None

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Compute the attention of layer `index` for query [1, Hq, T, D]: Hq query heads, T new tokens. Return the
        output [1, T, Hq, Dv], Dv being the width of a value.

        key, value: what the model passes to its attention function: [1, Hkv, T, D or Dv] of Hkv KV heads and the T new
        tokens or, if the cache's `needs_gather` is true, [1, Hkv, S, D or Dv] of all S tokens, cached and new.
        arguments: the keyword arguments of that function. Raises NotImplementedError, at the self-test, for a model
        that changes keys after `update`.
        """
        layer = self.layers[index]
        options = self._options(index, query, arguments)
        queries = query[0].transpose(0, 1)  # [T, Hq, D]
        if self.needs_gather:
            keys = key[0].transpose(0, 1)  # [S, Hkv, D]
            values = value[0].transpose(0, 1)  # [S, Hkv, Dv]
            return self._attention.attend_gathered(queries, keys, values, layer.plan, options).unsqueeze(0)
        if key is not layer.returned_keys:
            raise NotImplementedError("the keys are changed after they were cached")
        return self._attention.attend(queries, layer.keys, layer.values, layer.plan, options).unsqueeze(0)

    def _options(self, index: int, query: Tensor, arguments: dict[str, Any]) -> AttentionOptions:
        window, chunk = self._limits[index]
        window = arguments.get("sliding_window", window)
        if chunk is not None:
            window = None
        scaling = arguments.get("scaling")
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        return AttentionOptions(
            scaling=scaling,
            window=window,
            chunk=chunk,
            softcap=arguments.get("softcap"),
            sinks=arguments.get("s_aux"),
            causal=arguments.get("is_causal") is not False,
        )


def paged_attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Compute attention for query [1, Hq, T, D]: Hq query heads and T tokens. Return the output [1, T, Hq, Dv], Dv
    being the width of a value, and None in place of attention weights. Called by transformers.

    Raises NotImplementedError, at the self-test, for a model that passes a mask or a bias of its own.
    """
    if _running.cache is None:
        raise RuntimeError(f"{ATTENTION_NAME} attention is called outside a forward of the paged path")
    if attention_mask is not None or arguments.get("position_bias") is not None:
        raise NotImplementedError("a mask or a bias")
    return _running.cache.attend(module.layer_idx, query, key, value, arguments), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
