"""The `paged` path as transformers' modules see it: a cache that writes into blocks, and an attention function.

The function is registered under a name that has no mask builder, so transformers makes no mask; causality, windows and
chunks are the attention backend's work. It finds the blocks through the cache that is running on its thread.

`layer_limits` and `declared` read which keys a layer's queries may see from the model's configuration, for every path.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, CacheLayerMixin, PreTrainedConfig

from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.loading.memory import new_storage
from outrider.engine.paths.paged_plan import AttentionOptions, PagedAttention, PagedPlan


def layer_limits(config: PreTrainedConfig, index: int) -> tuple[int | None, int | None]:
    """Return a layer's (window, chunk) in keys, None for all.

    These are the limits of classes whose attention leaves them to the mask. Classes that pass limits to the attention
    function override them there.
    """
    layer_types = declared(config, "layer_types")
    kind = layer_types[index] if layer_types else "sliding_attention"
    window = declared(config, "sliding_window") if kind == "sliding_attention" else None
    chunk = declared(config, "attention_chunk_size") if kind == "chunked_attention" else None
    return window, chunk


def declared(config: PreTrainedConfig, name: str) -> Any:
    """Return the config's value of `name`, or None when the class does not know it.

    transformers keeps unknown names, and the model ignores them: a Mistral or Qwen that was saved as a Llama has its
    window in config.json, and full attention.
    """
    known = name in inspect.signature(type(config).__init__).parameters
    return getattr(config, name) if known else None


ATTENTION_NAME = "outrider_paged"


class _Running(threading.local):
    cache: PagedCache | None = None


_running = _Running()


class PagedLayer(CacheLayerMixin):
    """Stores one layer's KV, allocated when its shape is first seen (MLA has different key and value widths)."""

    def __init__(self, num_blocks: int, block_size: int, gathers: bool) -> None:
        super().__init__()
        self.plan: PagedPlan | None = None
        self.read: Tensor | None = None
        """Keys that `update` gave the model; any others in the attention call were made by the model."""
        self._shape = (num_blocks + 1, block_size)  # and the trash block
        self._gathers = gathers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._new_storage(key_states), self._new_storage(value_states)
        self.is_initialized = True

    def _new_storage(self, states: Tensor) -> Tensor:
        """Return [num_blocks + 1, block_size, H, D] for states [1, H, T, D]."""
        shape = (*self._shape, states.shape[1], states.shape[3])
        storage = new_storage(shape, states.dtype, states.device)
        storage[TRASH_BLOCK].zero_()
        return storage

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new states [1, H, T, D] and return what the model takes for keys and values.

        That is the same states, since the attention function reads the blocks; or all rows' [1, H, S, D] for latent
        attention.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.plan is not None and self.keys is not None and self.values is not None
        _write(self.keys, key_states, self.plan)
        _write(self.values, value_states, self.plan)
        if self._gathers:
            key_states, value_states = _gather(self.keys, self.plan), _gather(self.values, self.plan)
        self.read = key_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0: positions are always given, so nothing is counted from this."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1  # transformers' own word for "no limit"

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        for storage in (self.keys, self.values):
            if storage is not None:
                for source, destination in copies:
                    storage[destination].copy_(storage[source])

    def move_tokens(self, sources: Tensor, destinations: Tensor) -> None:
        """Move KV within the storage. Both are [N] int64 storage indices on the storage's device."""
        for storage in (self.keys, self.values):
            if storage is not None:
                flat = storage.flatten(0, 1)  # [tokens, H, D], a view
                flat.index_copy_(0, destinations, flat.index_select(0, sources))

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token in this layer; 0 while the shape is unknown."""
        return sum(s[0, 0].numel() * s.element_size() for s in (self.keys, self.values) if s is not None)


def _write(storage: Tensor, states: Tensor, plan: PagedPlan) -> None:
    storage.flatten(0, 1).index_copy_(0, plan.write_to, states[0].transpose(0, 1))


def _gather(storage: Tensor, plan: PagedPlan) -> Tensor:
    """Return all tokens of all rows, [1, H, S, D]."""
    assert plan.gather is not None
    return storage.flatten(0, 1).index_select(0, plan.gather).transpose(0, 1).unsqueeze(0)


class PagedCache(Cache):
    """Holds all layers. A forward runs inside `running(plan)`."""

    layers: list[PagedLayer]

    def __init__(self, config: PreTrainedConfig, attention: PagedAttention, num_blocks: int, block_size: int) -> None:
        """Allocate nothing yet; read each layer's limits from the text model's own config."""
        self.gathers = getattr(config, "kv_lora_rank", None) is not None
        """Whether the model needs all of the cache back: latent attention (MLA) makes keys of what it reads from it."""
        num_layers = config.num_hidden_layers
        super().__init__(layers=[PagedLayer(num_blocks, block_size, self.gathers) for _ in range(num_layers)])
        self._attention = attention
        self._limits = [layer_limits(config, i) for i in range(num_layers)]

    @contextmanager
    def running(self, plan: PagedPlan) -> Iterator[None]:
        """Make the attention function of this thread use this cache and plan."""
        for layer in self.layers:
            layer.plan = plan
        self._attention.begin(plan)
        _running.cache = self
        try:
            yield
        finally:
            _running.cache = None

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
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

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, wanted: dict[str, Any]) -> Tensor:
        """Attend with query [1, Hq, T, D] in layer `index`; return [1, T, Hq, Dv]."""
        layer, plan = self.layers[index], self.layers[index].plan
        assert plan is not None and layer.keys is not None and layer.values is not None
        window, chunk = self._limits[index]
        options = AttentionOptions(
            scaling=query.shape[-1] ** -0.5 if wanted.get("scaling") is None else wanted["scaling"],
            window=wanted.get("sliding_window", window) if chunk is None else None,
            chunk=chunk,
            softcap=wanted.get("softcap"),
            sinks=wanted.get("s_aux"),
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
    if attention_mask is not None or wanted.get("position_bias") is not None or wanted.get("is_causal") is False:
        raise NotImplementedError("a mask, a bias or attention to later tokens")
    return _running.cache.attend(module.layer_idx, query, key, value, wanted), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
