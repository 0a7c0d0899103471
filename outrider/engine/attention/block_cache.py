"""The caches of `paged` and `dense`: each layer's storage in blocks, and the limits of its attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, CacheLayerMixin, PreTrainedConfig

from outrider.engine.architectures.layer_memory import layer_config
from outrider.engine.host_copy import to_device
from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.memory import new_storage


def num_decoder_layers(config: PreTrainedConfig) -> int:
    """Return how many layers a model's decoder has; the text model's of one without an encoder."""
    text = config.get_text_config(decoder=True)
    count: int | None = getattr(text, "num_decoder_layers", None) if config.is_encoder_decoder else None
    return count or text.num_hidden_layers


def layer_limits(config: PreTrainedConfig, index: int) -> tuple[int | None, int | None]:
    """Return a layer's (window, chunk) in keys, None for all.

    These are the limits of classes whose attention leaves them to the mask. Classes that pass limits to the attention
    function override them there.
    """
    layer_types = declared(config, "layer_types")
    kind = layer_types[index] if layer_types else "sliding_attention"
    layer = layer_config(config, index)
    window = declared(layer, "sliding_window") if kind == "sliding_attention" else None
    chunk = declared(layer, "attention_chunk_size") if kind == "chunked_attention" else None
    return window, chunk


def declared(config: PreTrainedConfig, name: str) -> Any:
    """Return the config's value of `name`, or None when the class does not know it.

    transformers keeps unknown names, and the model ignores them: a Mistral or Qwen that was saved as a Llama has its
    window in config.json, and full attention.
    """
    known = name in inspect.signature(type(config).__init__).parameters
    return getattr(config, name) if known else None


class BlockLayer(CacheLayerMixin):
    """Stores what one layer keeps per token, each storage allocated when its shape is first seen (MLA has different
    key and value widths, and a layer may keep more than keys and values, or nothing)."""

    plan: Any = None
    """The running forward's, set by the cache; None where nothing is to be kept."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self._shape = (num_blocks + 1, block_size)  # and the trash block
        self.more: dict[str, Tensor] = {}
        """Storages beside keys and values, each [num_blocks + 1, block_size, H, D]."""

    @property
    def storages(self) -> list[Tensor]:
        """All that is allocated."""
        own = [storage for storage in (self.keys, self.values) if storage is not None]
        return [*own, *self.more.values()]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._new_storage(key_states), self._new_storage(value_states)
        self.is_initialized = True

    def _new_storage(self, states: Tensor) -> Tensor:
        """Return [num_blocks + 1, block_size, H, D] in the dtype of states [B, H, q, D]."""
        shape = (*self._shape, states.shape[1], states.shape[3])
        storage = new_storage(shape, states.dtype, states.device)
        storage[TRASH_BLOCK].zero_()
        return storage

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new states [B, H, q, D] and return what the model takes for keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.plan is None:
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        return self.write_and_read(self.keys, key_states), self.write_and_read(self.values, value_states)

    def write_and_read(self, storage: Tensor, states: Tensor) -> Tensor:
        """Write one of the two into its storage, as the plan says, and return it as the model takes it."""
        raise NotImplementedError

    def get_max_length(self) -> int:
        return -1  # transformers' own word for "no limit"

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        for storage in self.storages:
            for source, destination in copies:
                storage[destination].copy_(storage[source])

    def move_tokens(self, sources: Tensor, destinations: Tensor) -> None:
        """Move tokens within the storages. Both are [N] int64 storage indices on the storages' device."""
        for storage in self.storages:
            flat = storage.flatten(0, 1)  # [tokens, H, D], a view
            flat.index_copy_(0, destinations, flat.index_select(0, sources))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer; 0 while the shapes are unknown."""
        return sum(storage[0, 0].numel() * storage.element_size() for storage in self.storages)


class BlockCache(Cache):
    """Holds all layers. Each must have the plan of a forward before it."""

    layers: list[Any]

    def begin(self, plan: Any) -> None:
        """Hand the plan of the next forward to all layers."""
        for layer in self.layers:
            layer.plan = plan

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for layer in self.layers if copies else ():
            layer.copy_blocks(copies)

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int], device: torch.device) -> None:
        read, written = to_device(np.array([sources, destinations], dtype=np.int64), device)  # [N] each
        for layer in self.layers:
            layer.move_tokens(read, written)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers that have run once."""
        return sum(layer.bytes_per_token for layer in self.layers)
