"""Shared parts of the caches of `paged` and `dense`: each layer's storage in blocks, and the limits of its
attention.
"""

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
    """Return the number of a model's decoder layers; in a multimodal model, those of the text model."""
    text = config.get_text_config(decoder=True)
    num_layers: int | None = None
    if config.is_encoder_decoder:
        num_layers = getattr(text, "num_decoder_layers", None)
    return num_layers or text.num_hidden_layers


def layer_limits(config: PreTrainedConfig, index: int) -> tuple[int | None, int | None]:
    """Return the sliding window and the chunk size of layer `index`, each a number of keys; None = the layer has no
    such limit.

    They are read from the model's configuration. Some classes also pass a window to the attention function; that window
    then takes precedence.
    """
    kind = "sliding_attention"  # the type of all layers where a configuration lists none and has a window
    layer_types = declared(config, "layer_types")
    if layer_types:
        kind = layer_types[index]
    layer = layer_config(config, index)
    if kind == "sliding_attention":
        return declared(layer, "sliding_window"), None
    if kind == "chunked_attention":
        return None, declared(layer, "attention_chunk_size")
    return None, None


def declared(config: PreTrainedConfig, name: str) -> Any:
    """Return the configuration's value of `name`; None if the configuration's class has no such parameter.

    Transformers stores every key of config.json as an attribute, also keys that the class does not know and the model
    ignores. For example, a Mistral that was saved as a Llama has a `sliding_window` in config.json, and runs with full
    attention.
    """
    if name not in inspect.signature(type(config).__init__).parameters:
        return None
    return getattr(config, name)


class BlockLayer(CacheLayerMixin):
    """KV cache of one layer, in blocks. It has a storage for keys, one for values and others for anything else that the
    layer keeps; a storage is one tensor of all blocks.

    A storage is allocated when the first states are written to it, since its shape and dtype are those of the states.
    Keys and values may differ in width (MLA). Some layers have neither.
    """

    plan: Any = None
    """Plan of the running forward, which `BlockCache.begin` sets. None in a forward whose keys and values are not
    kept."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: number of blocks without the trash block. block_size: number of tokens in a block."""
        super().__init__()
        self._shape = (num_blocks + 1, block_size)  # and the trash block
        self.more: dict[str, Tensor] = {}
        """Storages other than keys and values, by name, each [num_blocks + 1, block_size, H, D]."""

    @property
    def storages(self) -> list[Tensor]:
        """All storages of the layer that are allocated, including those of keys and values."""
        own = [storage for storage in (self.keys, self.values) if storage is not None]
        return [*own, *self.more.values()]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the storages of keys and values, with the H, D, dtype and device of these states [B, H, q, D] (q new
        tokens). Called by `update`.
        """
        self.keys = self._new_storage(key_states)
        self.values = self._new_storage(value_states)
        self.is_initialized = True

    def _new_storage(self, states: Tensor) -> Tensor:
        # states [B, H, q, D] -> [num_blocks + 1, block_size, H, D] of the same dtype
        shape = (*self._shape, states.shape[1], states.shape[3])
        storage = new_storage(shape, states.dtype, states.device)
        storage[TRASH_BLOCK].zero_()
        return storage

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the q new tokens of each sequence, [B, H, q, D] each. Return the keys and values
        of all tokens, cached and new, or only the new ones if the attention path reads the storages itself.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.plan is None:
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        return self.write_and_read(self.keys, key_states), self.write_and_read(self.values, value_states)

    def write_and_read(self, storage: Tensor, states: Tensor) -> Tensor:
        """Write the states [B, H, q, D] of the q new tokens of each sequence into a storage, at the storage indices of
        the plan. Return the states of all tokens, cached and new, or `states` if the attention path reads the storage.
        """
        raise NotImplementedError

    def get_max_length(self) -> int:
        """Return -1, which means to transformers that the cache has no maximum length."""
        return -1

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks to other blocks, in all storages of the layer. copies: pairs (from, to) of block numbers."""
        for storage in self.storages:
            for source, destination in copies:
                storage[destination].copy_(storage[source])

    def move_tokens(self, from_indices: Tensor, to_indices: Tensor) -> None:
        """Move tokens within all storages. from_indices, to_indices: storage indices (block * block_size + offset), [N]
        int64 on the storages' device.
        """
        for storage in self.storages:
            flat = storage.flatten(0, 1)  # [tokens, H, D], a view
            flat.index_copy_(0, to_indices, flat.index_select(0, from_indices))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer's storages; 0 before the first forward."""
        return sum(storage[0, 0].numel() * storage.element_size() for storage in self.storages)


class BlockCache(Cache):
    """Layers of the KV cache of one model. Call `begin` with the plan of a forward before that forward runs."""

    layers: list[Any]

    def begin(self, plan: Any) -> None:
        """Set the plan of the next forward in all layers."""
        for layer in self.layers:
            layer.plan = plan

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in all layers. copies: pairs (from, to) of block numbers."""
        if not copies:
            return
        for layer in self.layers:
            layer.copy_blocks(copies)

    def move_tokens(self, from_indices: Sequence[int], to_indices: Sequence[int], device: torch.device) -> None:
        """Move tokens from `from_indices` to `to_indices` in all layers; both are storage indices (block * block_size +
        offset). device: the storages' device.
        """
        read, written = to_device(np.array([from_indices, to_indices], dtype=np.int64), device)  # [N] each
        for layer in self.layers:
            layer.move_tokens(read, written)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the storages of all layers together; 0 before the first forward."""
        return sum(layer.bytes_per_token for layer in self.layers)
