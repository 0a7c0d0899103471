"""The `paged` path as transformers' modules see it: a cache that writes into blocks, and an attention function.

The function is registered under a name that has no mask builder, so transformers makes no mask; causality, windows and
chunks are the attention backend's work. It finds the blocks through the cache that is running on its thread.
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


class _Running(threading.local):
    cache: PagedCache | None = None


_running = _Running()


class PagedLayer(BlockLayer):
    """Hands the model its new states: the attention function reads the blocks."""

    def __init__(self, num_blocks: int, block_size: int, gathers: bool) -> None:
        """gathers: whether the model takes all rows' states [1, H, S, D] instead."""
        super().__init__(num_blocks, block_size)
        self.read: Tensor | None = None
        """Keys that `update` gave the model; any others in the attention call were made by the model."""
        self._gathers = gathers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.read, values = super().update(key_states, value_states)
        return self.read, values

    def write_and_read(self, storage: Tensor, states: Tensor) -> Tensor:
        flat = storage.flatten(0, 1)  # [tokens, H, D], a view
        flat.index_copy_(0, self.plan.write_to, states[0].transpose(0, 1))
        return flat.index_select(0, self.plan.gather).transpose(0, 1).unsqueeze(0) if self._gathers else states

    def get_seq_length(self) -> int:
        """Return 0: positions are always given, so nothing is counted from this."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class PagedCache(BlockCache):
    """Holds all layers. A forward runs inside `running(plan)`."""

    def __init__(self, config: PreTrainedConfig, attention: PagedAttention, num_blocks: int, block_size: int) -> None:
        """Allocate nothing yet; read each layer's limits from the text model's own config."""
        self.gathers = getattr(config, "kv_lora_rank", None) is not None
        """Whether the model needs all of the cache back: latent attention (MLA) makes keys of what it reads from it."""
        num_layers = config.num_hidden_layers
        super().__init__(layers=[PagedLayer(num_blocks, block_size, self.gathers) for _ in range(num_layers)])
        self._attention = attention
        self._limits = [layer_limits(config, i) for i in range(num_layers)]

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return 0: positions are always given. A layer that asks for itself (Llama 4's, whose attention has a
        temperature by position) adds this to its columns, and gets what makes positions [T] of them.
        """
        plan = None if layer_idx is None else self.layers[layer_idx].plan
        if plan is None:
            return 0
        positions = plan.position_ids[0]  # [T]
        return positions - torch.arange(positions.shape[0], device=positions.device)

    @contextmanager
    def running(self, plan: PagedPlan) -> Iterator[None]:
        """Make the attention function of this thread use this cache and plan."""
        self.begin(plan)
        self._attention.begin(plan)
        _running.cache = self
        try:
            yield
        finally:
            _running.cache = None

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, wanted: dict[str, Any]) -> Tensor:
        """Attend with query [1, Hq, T, D] in layer `index`; return [1, T, Hq, Dv]."""
        layer, plan = self.layers[index], self.layers[index].plan
        window, chunk = self._limits[index]
        options = AttentionOptions(
            scaling=query.shape[-1] ** -0.5 if wanted.get("scaling") is None else wanted["scaling"],
            window=wanted.get("sliding_window", window) if chunk is None else None,
            chunk=chunk,
            softcap=wanted.get("softcap"),
            sinks=wanted.get("s_aux"),
            causal=wanted.get("is_causal") is not False,
        )
        queries = query[0].transpose(0, 1)  # [T, Hq, D]
        if self.gathers:
            keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [S, H, D]
            return self._attention.attend_gathered(queries, keys, values, plan, options).unsqueeze(0)
        if key is not layer.read:
            raise NotImplementedError("the keys are changed after they were cached")
        return self._attention.attend(queries, layer.keys, layer.values, plan, options).unsqueeze(0)


def paged_attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **wanted: Any
) -> tuple[Tensor, None]:
    """Attend with query [1, Hq, T, D]; return [1, T, Hq, Dv]. Called by transformers for `ATTENTION_NAME`."""
    if _running.cache is None:
        raise RuntimeError(f"{ATTENTION_NAME} attention is called outside a forward of the paged path")
    if attention_mask is not None or wanted.get("position_bias") is not None:
        raise NotImplementedError("a mask or a bias")
    return _running.cache.attend(module.layer_idx, query, key, value, wanted), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
