"""The `dense` path: transformers' own modules, masks and attention over rows aligned to the right.

It runs every model that transformers runs with a cache, including encoder-decoder models (`cross_attention`). Each
layer of the cache writes the new tokens' keys and values into the pool's blocks and returns the whole rows. Layers with
a sliding window also keep every token, since a ring buffer cannot be rolled back; masks apply the window.

Transformers builds its masks from the columns alone, in which a node's siblings would be earlier tokens. If a row is a
token tree, `TreeMasks` builds the mask, and transformers uses it unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.architectures.layer_memory import RUNNING_STATE, layer_types, memories
from outrider.engine.attention.block_cache import (
    BlockCache,
    BlockLayer,
    declared,
    layer_limits,
    num_decoder_layers,
)
from outrider.engine.attention.cross_attention import CrossAttention
from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.attention.module_taps import ModuleTaps
from outrider.engine.host_copy import to_device
from outrider.engine.step_plan import EncoderSource, Row, StepPlan, group_rows, has_trees
from outrider.engine.token_tree import visible_tokens

OWN_WINDOWS = ("gpt_neo", "moshi")
"""Model types whose own code applies a sliding window by columns of the batch, or applies none, even if the
configuration states one. They cannot run token trees."""


class Tree(Protocol):
    """Interface of a sequence that may end with a token tree, such as `Row`."""

    @property
    def num_tokens(self) -> int:
        """Number of the sequence's tokens, those of the tree included."""

    @property
    def parents(self) -> Sequence[int] | None:
        """For each node of the tree the index of its parent node; -1 = its parent is the token before the tree. None
        for a chain.
        """


class TreeMasks:
    """Builder of a model's attention masks for token trees, one mask for each type of layer."""

    def __init__(self, config: PreTrainedConfig, *, needs_positions: bool) -> None:
        """Read the window and the chunk size of each type of layer from `config`, the text model's configuration.

        needs_positions: whether the model takes position ids; False = it counts columns (ALiBi).
        """
        self._model_type = config.model_type
        self._needs_positions = needs_positions
        kinds = declared(config, "layer_types") or ["full_attention"] * config.num_hidden_layers
        self._limits = {kind: layer_limits(config, index) for index, kind in enumerate(kinds)}

    def of(
        self, trees: Sequence[Tree], num_queries: int, kv_len: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | dict[str, Tensor]:
        """Return the attention masks of B sequences for their last `num_queries` tokens. The sequences are aligned to
        the right in `kv_len` columns.

        A mask is [B, 1, num_queries, kv_len] in `dtype`, to be added to the scores: 0 if a query attends to a key,
        otherwise the lowest number of the dtype. Returns one mask or, if the model has several types of layers, one
        mask by type. Raises NotImplementedError, at the self-test, for a model that takes the index of a column for the
        position of its token, so that siblings in a tree cannot have one position.
        """
        if not self._needs_positions:
            raise NotImplementedError(f"{self._model_type} takes no positions")
        if self._model_type in OWN_WINDOWS:
            raise NotImplementedError(f"the modules of {self._model_type} count their windows by columns")
        masks: dict[str, Tensor] = {}
        for kind, (window, chunk) in self._limits.items():
            sees = np.zeros((len(trees), 1, num_queries, kv_len), dtype=bool)  # [B, 1, q, L]
            for i, tree in enumerate(trees):
                own = visible_tokens(tree.num_tokens, tree.parents, num_queries, window, chunk)  # [q, num_tokens]
                sees[i, 0, :, kv_len - tree.num_tokens :] = own
            masks[kind] = torch.where(to_device(sees, device), 0.0, torch.finfo(dtype).min).to(dtype)
        if len(masks) == 1:
            return next(iter(masks.values()))
        return masks


class DenseLayer(BlockLayer):
    """Layer of the `dense` path's cache. It gives the model the states of all tokens of the sequences, cached and new,
    as a padded batch: keys, values and anything else that the layer keeps.
    """

    record_past = True
    """Read by transformers. True = short convolutions get their earlier inputs from the cache and keep no state of
    their own."""

    def write_and_read(self, storage: Tensor, states: Tensor) -> Tensor:
        """Write the states [B, H, q, D] of q new tokens per sequence into a storage. Return the states of the
        padded batch, cached and new, [B, H, L, D], L being its length in tokens.
        """
        self._write(storage, states)
        return self._read(storage, 0)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write a sparse indexer's keys [B, q, D] of q new tokens per sequence. Return the indexer's keys of the padded
        batch, cached and new, [B, L, D], L being its length in tokens.
        """
        return self.update_index(indexer_key_states.unsqueeze(1)).squeeze(1)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Write a block indexer's keys [B, 1, q, D] of q new tokens per sequence. Return the indexer's keys of the
        padded batch, cached and new, [B, 1, L, D], L being its length in tokens.
        """
        if self.plan is None:
            return idx_k
        return self.write_and_read(self._storage("indexer", idx_k), idx_k)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Write the inputs [B, D, q] of a short convolution with D channels for q new tokens per sequence. Return them,
        preceded by the inputs of the kernel_size - 1 tokens before.

        The result is [B, D, kernel_size - 1 + q], with zeros for inputs before the first token of a sequence.
        `state_idx`: number of the convolution in the layer. Raises NotImplementedError, at the self-test, for a class
        that passes a state in place of its inputs.
        """
        # kernel_size 4, q 2: of L 5 the columns 0 to 2 are read before the new ones; of L 3 column 0, after two zeros
        if self.plan is None:
            return conv_states
        if conv_kernel_size is None or conv_states.shape[-1] != self.plan.num_queries:
            raise NotImplementedError("a convolution gives a state in place of its inputs")
        inputs = conv_states.transpose(1, 2).unsqueeze(1)  # [B, 1, q, D]
        storage = self._storage(f"convolution {state_idx}", inputs)
        self._write(storage, inputs)
        num_past = self.get_seq_length()
        num_read = min(num_past, conv_kernel_size - 1)
        past = self._read(storage, num_past - num_read)[:, 0, :num_read].transpose(1, 2)  # [B, D, num_read]
        return nn.functional.pad(torch.cat([past, conv_states], dim=-1), (conv_kernel_size - 1 - num_read, 0))

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Raise NotImplementedError: layers with a state that cannot be rolled back are not served."""
        raise NotImplementedError(f"it keeps {RUNNING_STATE}")

    def _storage(self, name: str, states: Tensor) -> Tensor:
        if name not in self.more:
            self.more[name] = self._new_storage(states)
        return self.more[name]

    def _write(self, storage: Tensor, states: Tensor) -> None:
        plan = self.plan
        flat = storage.flatten(0, 1)  # [tokens, H, D], a view
        new = states.transpose(1, 2)  # [B, q, H, D]
        if plan.start is not None:  # one row in consecutive blocks: its last q columns
            end = plan.start + plan.kv_len
            flat[end - plan.num_queries : end].copy_(new[0])
            return
        columns = new.flatten(0, 1)  # [B * q, H, D]
        if plan.write_from is not None:
            columns = columns.index_select(0, plan.write_from)  # [N, H, D]
        flat.index_copy_(0, plan.write_to, columns)

    def _read(self, storage: Tensor, first: int) -> Tensor:
        # The columns from `first` on, [B, H, L - first, D]. Those of padding are zeros: the trash block's.
        plan = self.plan
        flat = storage.flatten(0, 1)  # [tokens, H, D], a view
        if plan.start is not None:
            return flat[plan.start + first : plan.start + plan.kv_len].transpose(0, 1).unsqueeze(0)
        gather = plan.gather  # [B * L]
        if first > 0:
            gather = gather.view(plan.num_rows, -1)[:, first:].reshape(-1)  # [B * (L - first)]
        gathered = flat.index_select(0, gather)  # [B * (L - first), H, D]
        return gathered.unflatten(0, (plan.num_rows, -1)).transpose(1, 2)

    def get_seq_length(self) -> int:
        """Return the number of the padded batch's columns that hold cached tokens. Those of the new tokens follow."""
        if self.plan is None:
            return 0
        num_past: int = self.plan.kv_len - self.plan.num_queries
        return num_past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return, for transformers' masks, the padded batch's length in tokens, cached and new, and first index, 0."""
        return self.get_seq_length() + query_length, 0


class DenseCache(BlockCache):
    """KV cache of the `dense` path, with transformers' methods for short convolutions and running states."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return None: `update_conv_state` already returns the inputs of the earlier tokens."""
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Write the inputs [B, D, q] of short convolution `state_idx` in layer `layer_idx`, for D channels and q new
        tokens. Return them, preceded by the kernel_size - 1 inputs before: [B, D, kernel_size - 1 + q].
        """
        inputs: Tensor = self.layers[layer_idx].update_conv_state(conv_states, state_idx, **kwargs)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Raise NotImplementedError: layers with a state that cannot be rolled back are not served."""
        state: Tensor = self.layers[layer_idx].update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether any sequence of the running forward has cached tokens."""
        return self.get_seq_length() > 0


class DensePath:
    """Attention path that runs transformers' own forward over a padded batch of sequences. Implements the interfaces
    `ForwardPath`, `TreePath` and `FeaturePath`.
    """

    name = "dense"
    batch_invariant = False
    block_size = BLOCK_SIZE

    def __init__(self, model: PreTrainedModel, vocab_size: int, num_ids: int, *, counts_columns: bool = False) -> None:
        """Prepare the model for padded rows.

        vocab_size: number of logits at a position. num_ids: number of token ids that may be fed. counts_columns: True =
        no positions are passed, and only rows of equal length share a forward, whose columns the model counts; for
        classes that number tokens by rules of their own.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._num_ids = num_ids
        parameters = inspect.signature(model.forward).parameters
        self._needs_positions = "position_ids" in parameters and not counts_columns
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._num_layers = num_decoder_layers(model.config)
        kinds = memories(layer_types(model.config)).values()
        text_config = model.config.get_text_config(decoder=True)
        has_temperature = bool(getattr(text_config, "attn_temperature_tuning", False))  # Llama 4's counts columns
        has_columns = any(kind.has_columns_as_positions for kind in kinds)
        self._has_equal_rows = has_temperature or has_columns or counts_columns
        needs_positions = self._needs_positions
        self._across: CrossAttention | None = None
        if model.config.is_encoder_decoder:
            self._across = CrossAttention(model, sets_positions=not counts_columns)
            needs_positions = needs_positions or self._across.needs_positions
        self._masks = TreeMasks(text_config, needs_positions=needs_positions and not has_temperature)
        self._cache: BlockCache | None = None
        self._taps = ModuleTaps(model)
        self.features = torch.empty(0)

    @property
    def kv_bytes_per_token(self) -> int:
        if self._cache is None:
            return 0
        return self._cache.bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._cache = DenseCache(layers=[DenseLayer(num_blocks, block_size) for _ in range(self._num_layers)])
        if self._across is not None:
            self._across.set_cache(self._cache)

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
        device = self._model.device
        if self._across is not None:
            rows = _encode_sources(rows, self._across, device)
        if not rows:
            self.features = torch.empty(0, device=device)
            return torch.empty(0, self._vocab_size, device=device)
        groups = group_rows(rows, of_equal_length=self._has_equal_rows)
        parts: list[Tensor] = [torch.empty(0, self._vocab_size, device=device)] * len(rows)
        features: list[Tensor] = [torch.empty(0, device=device)] * len(rows)
        for group in groups:
            logits = self._forward_one([rows[index] for index in group])  # [B, M, V]
            tapped = self._taps.pop()  # [B, q, taps, d]
            for b, index in enumerate(group):
                parts[index] = logits[b, logits.shape[1] - rows[index].num_logits :]  # [num_logits, V]
                if tapped is not None:
                    features[index] = tapped[b, tapped.shape[1] - rows[index].num_new :]  # [num_new, taps, d]
        self.features = torch.cat(features)
        has_equal_logits = len({row.num_logits for row in rows}) == 1
        if len(groups) == 1 and has_equal_logits and rows[0].num_logits:
            return logits.flatten(0, 1)  # as they are, without a copy
        return torch.cat(parts)

    def _forward_one(self, rows: Sequence[Row]) -> Tensor:
        # Returns the logits [B, M, V] float32 of the last M columns: M is the most of a row, at least 1.
        assert self._cache is not None
        plan = StepPlan.build(rows, self._model.device, self._num_ids)
        self._cache.begin(plan)
        # transformers takes 0 for every column; one needless row of the head is the cheapest that it computes.
        num_kept = max(1, max(row.num_logits for row in rows))
        arguments: dict[str, Any] = {"input_ids": plan.input_ids, "attention_mask": plan.attention_mask}
        arguments |= {"past_key_values": self._cache, "use_cache": True}
        if has_trees(rows):
            arguments["attention_mask"] = self._masks.of(
                rows, plan.num_queries, plan.kv_len, self._model.dtype, self._model.device
            )
        if self._needs_positions:
            arguments["position_ids"] = plan.position_ids
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_kept
        if self._across is None:
            output = self._model(**arguments)
        else:
            with self._across.forward(rows, plan, arguments) as all_arguments:
                output = self._model(**all_arguments)
        return output.logits[:, -num_kept:].float()


def _encode_sources(rows: Sequence[Row], across: CrossAttention, device: torch.device) -> Sequence[Row]:
    # Returns the rows that have tokens to feed; the others are there for their sources alone.
    sources: list[EncoderSource] = []
    remaining: list[Row] = []
    for row in rows:
        if row.new_ids:
            remaining.append(row)
        elif row.source is not None:
            sources.append(row.source)
    if sources:
        across.encode(sources, device)
    return remaining
