"""The `dense` path: transformers' own modules, masks and attention over rows aligned to the right. Runs everything,
encoder-decoder models among it (`cross_attention`).

The model sees an ordinary `Cache`. Each layer writes the new tokens' KV into the pool's blocks and hands back the whole
rows. Sliding-window layers keep every token too, since a ring buffer cannot roll back; the masks do the rest.

transformers builds its masks from the columns alone, in which a node's siblings would be its past. Where a row is a
token tree, this module builds the mask, and transformers takes a ready one as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.architectures.layer_memory import RUNNING, layer_types, memories
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
from outrider.engine.step_plan import Row, StepPlan, group_rows
from outrider.engine.token_tree import seen

OWN_WINDOWS = ("gpt_neo", "moshi")
"""Model types whose modules cut windows out of the columns themselves, or see all, whatever a configuration says."""


class Tree(Protocol):
    """A sequence that may end with a token tree, as `Row` has it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def parents(self) -> Sequence[int] | None: ...


class TreeMasks:
    """Builds a model's attention masks for token trees, one for each kind of layer."""

    def __init__(self, config: PreTrainedConfig, *, takes_positions: bool) -> None:
        """Read the limits of each kind of layer from the text model's own config.

        takes_positions: whether the model takes position ids; otherwise it counts columns (ALiBi).
        """
        self._model_type, self._takes_positions = config.model_type, takes_positions
        kinds = declared(config, "layer_types") or ["full_attention"] * config.num_hidden_layers
        self._limits = {kind: layer_limits(config, index) for index, kind in enumerate(kinds)}

    def of(
        self, trees: Sequence[Tree], num_queries: int, kv_len: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | dict[str, Tensor]:
        """Return the mask [B, 1, q, L] to be added to the scores, 0 or the least number, of the last q tokens of
        sequences that end in column L; by kind where there are several.

        Raises NotImplementedError, at the self-test, for a model that takes places in the cache for positions.
        """
        if not self._takes_positions:
            raise NotImplementedError(f"{self._model_type} takes no positions")
        if self._model_type in OWN_WINDOWS:
            raise NotImplementedError(f"the modules of {self._model_type} count their windows by columns")

        def mask(window: int | None, chunk: int | None) -> Tensor:
            sees = np.zeros((len(trees), 1, num_queries, kv_len), dtype=bool)
            for i, tree in enumerate(trees):
                own = seen(tree.num_tokens, tree.parents, num_queries, window, chunk)
                sees[i, 0, :, kv_len - tree.num_tokens :] = own
            return torch.where(to_device(sees, device), 0.0, torch.finfo(dtype).min).to(dtype)

        masks = {kind: mask(*limits) for kind, limits in self._limits.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


class DenseLayer(BlockLayer):
    """Hands the model all columns of the rows, of whatever it keeps beside keys and values too."""

    record_past = True
    """To transformers: short convolutions are fed their inputs, and keep no state of their own."""

    def write_and_read(self, storage: Tensor, states: Tensor) -> Tensor:
        """Write the new columns [B, H, q, D] and return all of them [B, H, L, D]."""
        self._write(storage, states)
        return self._read(storage, 0)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the new columns [B, q, D] of a sparse indexer's keys and return all of them [B, L, D]."""
        return self.update_index(indexer_key_states.unsqueeze(1)).squeeze(1)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Write the new columns [B, 1, q, D] of a block indexer's keys and return all of them [B, 1, L, D]."""
        return idx_k if self.plan is None else self.write_and_read(self._storage("indexer", idx_k), idx_k)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Write the new inputs [B, D, q] of a short convolution; return them behind the kernel_size - 1 before them,
        [B, D, kernel_size - 1 + q], zeros where a sequence begins.

        Raises NotImplementedError, at the self-test, for a class that gives what it has made of its inputs.
        """
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
        raise NotImplementedError(f"it keeps {RUNNING}")

    def _storage(self, name: str, states: Tensor) -> Tensor:
        """Return the storage of that name, made for states [B, H, q, D] when it is first asked for."""
        if name not in self.more:
            self.more[name] = self._new_storage(states)
        return self.more[name]

    def _write(self, storage: Tensor, states: Tensor) -> None:
        """Write the new columns [B, H, q, D]."""
        plan, flat = self.plan, storage.flatten(0, 1)  # [tokens, H, D], a view
        new = states.transpose(1, 2)  # [B, q, H, D]
        if plan.start is not None:
            end = plan.start + plan.kv_len
            flat[end - plan.num_queries : end].copy_(new[0])
            return
        columns = new.flatten(0, 1)  # [B * q, H, D]
        if plan.write_from is not None:
            columns = columns.index_select(0, plan.write_from)  # [N, H, D]
        flat.index_copy_(0, plan.write_to, columns)

    def _read(self, storage: Tensor, first: int) -> Tensor:
        """Return the columns from `first` on, [B, H, L - first, D]; those of padding are zeros."""
        plan, flat = self.plan, storage.flatten(0, 1)  # [tokens, H, D], a view
        if plan.start is not None:
            return flat[plan.start + first : plan.start + plan.kv_len].transpose(0, 1).unsqueeze(0)
        gather = plan.gather if first == 0 else plan.gather.view(plan.num_rows, -1)[:, first:].reshape(-1)
        gathered = flat.index_select(0, gather)  # [B * (L - first), H, D]
        return gathered.unflatten(0, (plan.num_rows, -1)).transpose(1, 2)

    def get_seq_length(self) -> int:
        """Return the number of columns before the new ones."""
        return 0 if self.plan is None else self.plan.kv_len - self.plan.num_queries

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class DenseCache(BlockCache):
    """Gives the layers that keep more than keys and values what transformers keeps in layers of its own classes."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None  # the past comes with `update_conv_state`

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        inputs: Tensor = self.layers[layer_idx].update_conv_state(conv_states, state_idx, **kwargs)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        state: Tensor = self.layers[layer_idx].update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.get_seq_length() > 0


class DensePath:
    """Implements `ForwardPath`."""

    name = "dense"
    batch_invariant = False
    block_size = BLOCK_SIZE

    def __init__(self, model: PreTrainedModel, vocab_size: int, num_ids: int, *, counts_columns: bool = False) -> None:
        """num_ids: that may be fed. counts_columns: give no positions, but rows of equal length, whose columns the
        model counts: for classes that number their tokens in a way of their own.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._num_ids = num_ids
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters and not counts_columns
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._num_layers = num_decoder_layers(model.config)
        kinds = memories(layer_types(model.config)).values()
        text_config = model.config.get_text_config(decoder=True)
        has_temperature = bool(getattr(text_config, "attn_temperature_tuning", False))  # Llama 4's counts columns
        has_columns = any(kind.has_columns_as_positions for kind in kinds)
        self._has_equal_rows = has_temperature or has_columns or counts_columns
        has_encoder = model.config.is_encoder_decoder
        self._across = CrossAttention(model, tells_places=not counts_columns) if has_encoder else None
        takes_positions = self._takes_positions or (self._across is not None and self._across.places_tokens)
        self._masks = TreeMasks(text_config, takes_positions=takes_positions and not has_temperature)
        self._cache: BlockCache | None = None
        self._taps = ModuleTaps(model)
        self.features = torch.empty(0)

    @property
    def kv_bytes_per_token(self) -> int:
        return 0 if self._cache is None else self._cache.bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._cache = DenseCache(layers=[DenseLayer(num_blocks, block_size) for _ in range(self._num_layers)])
        if self._across is not None:
            self._across.set_cache(self._cache)

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
        device = self._model.device
        fresh = [row.source for row in rows if not row.new_ids and row.source is not None]
        if fresh and self._across is not None:
            self._across.encode(fresh, device)
            rows = [row for row in rows if row.new_ids]  # of the others nothing is asked
        groups = group_rows(rows, of_equal_length=self._has_equal_rows)
        parts: list[Tensor] = [torch.empty(0, self._vocab_size, device=device)] * len(rows)
        features: list[Tensor] = [torch.empty(0, device=device)] * len(rows)
        whole = len(groups) == 1 and len({row.num_logits for row in rows}) == 1 and rows[0].num_logits
        for group in groups:
            logits = self._forward_one([rows[i] for i in group])  # [B, M, V]
            seen = self._taps.take()  # [B, q, taps, H]
            for b, i in enumerate(group):
                parts[i] = logits[b, logits.shape[1] - rows[i].num_logits :]
                if seen is not None:
                    features[i] = seen[b, seen.shape[1] - rows[i].num_new :]
        self.features = torch.cat(features) if features else torch.empty(0, device=device)
        if whole:  # as it is, without a copy
            return logits.flatten(0, 1)
        return torch.cat(parts) if parts else torch.empty(0, self._vocab_size, device=device)

    def _forward_one(self, rows: Sequence[Row]) -> Tensor:
        """Return the logits [B, M, V] float32 of the last M columns; M is the most that a row asks for, at least 1."""
        assert self._cache is not None
        plan = StepPlan.build(rows, self._model.device, self._num_ids)
        self._cache.begin(plan)
        # 0 would mean every column to transformers; one row of the head too many is the cheapest there is.
        num_kept = max(1, max(row.num_logits for row in rows))
        arguments: dict[str, Any] = {"input_ids": plan.input_ids, "attention_mask": plan.attention_mask}
        arguments |= {"past_key_values": self._cache, "use_cache": True}
        if any(row.parents is not None for row in rows):
            shape = (plan.num_queries, plan.kv_len)
            arguments["attention_mask"] = self._masks.of(rows, *shape, self._model.dtype, self._model.device)
        if self._takes_positions:
            arguments["position_ids"] = plan.position_ids
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_kept
        if self._across is None:
            output = self._model(**arguments)
        else:
            with self._across.forward(rows, plan, arguments) as all_arguments:
                output = self._model(**all_arguments)
        return output.logits[:, -num_kept:].float()
