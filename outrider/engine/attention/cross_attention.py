"""Parts of the `dense` path for encoder-decoder models: the encoder, keys and values of cross-attention, and positions.

The keys and values of a source, for cross-attention, are stored in blocks like those of the decoder's tokens. Each
layer computes and writes them once, after the encoder has run, and reads them in later forwards, so that no output of
the encoder is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, CacheLayerMixin, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import MoEModelOutput

from outrider.engine.attention.block_cache import BlockCache, BlockLayer
from outrider.engine.host_copy import to_device
from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.step_plan import (
    EncoderSource,
    Row,
    StepPlan,
    check_ids,
    consecutive_start,
    group_widths,
    has_trees,
)


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """Where the B sources of a forward (the inputs of the encoder) lie, as tensors. The sources are the lines of a
    matrix of S columns, with padding at the end of the shorter ones.

    Example: sources of 2 and 3 tokens: B 2, S 3, mask [[1, 1, 0], [1, 1, 1]], columns [0, 1, 3, 4, 5].
    """

    mask: Tensor | None
    """Mask of B sources, padded to S tokens, [B, S] int64: 1 for tokens, 0 for padding; None if there is no padding."""
    start: int | None
    """Storage index of the source's first token, if there is one source and its blocks are consecutive: it is then read
    in place, without a copy. None otherwise."""
    gather: Tensor
    """Storage index (block * block_size + offset) of each entry of the padded [B, S] matrix of sources, [B * S] int64;
    for padding an index in the trash block."""
    input_ids: Tensor
    """Token ids of B sources, padded with 0 to S tokens, [B, S] int64."""
    columns: Tensor
    """Indices of the N entries that are tokens among all entries of the padded matrix of sources [B, S], [N] int64. S:
    tokens of the longest source."""
    shape: tuple[int, int]
    """(B, S): number of sources, and number of tokens of the longest one."""

    @classmethod
    def build(cls, sources: Sequence[EncoderSource], device: torch.device, vocab_size: int) -> SourcePlan:
        """Return the plan of these sources, for whose tokens blocks are reserved in their block tables.

        Raises InvalidRequest for a token id that is not below `vocab_size`.
        """
        lengths = np.array([len(source.ids) for source in sources])  # [B]
        width = int(lengths.max())
        is_token = np.arange(width)[None, :] < lengths[:, None]  # [B, S] bool
        gather = np.full(is_token.shape, TRASH_BLOCK * sources[0].table.block_size, dtype=np.int64)  # [B, S]
        ids = np.zeros(is_token.shape, dtype=np.int64)  # [B, S]
        for row, source in enumerate(sources):
            gather[row, : lengths[row]] = source.table.storage_indices(range(len(source.ids)))
            ids[row, : lengths[row]] = source.ids
        check_ids(ids, vocab_size)
        mask = None
        if not is_token.all():
            mask = to_device(is_token.astype(np.int64), device)
        start = None
        if len(sources) == 1:
            start = consecutive_start(sources[0].table)
        return cls(
            mask=mask,
            start=start,
            gather=to_device(gather.reshape(-1), device),
            input_ids=to_device(ids, device),
            columns=to_device(np.flatnonzero(is_token), device),
            shape=(len(sources), width),
        )


class CrossLayer(CacheLayerMixin):
    """Cross-attention cache of one layer: the keys and values of the sources. They lie in the storages of the layer's
    self-attention cache, in blocks that are reserved for the source.
    """

    plan: SourcePlan | None = None
    """Plan of the sources of the running forward; None before the first forward."""

    def __init__(self, own: BlockLayer) -> None:
        """own: cache layer of the decoder's own tokens, whose storage is used."""
        self._own = own  # no super().__init__: it would set keys and values, which are properties here

    @property
    def keys(self) -> Tensor:
        """Keys of the sources of the running forward, [B, H, S, D], padded to the S tokens of the longest."""
        return self._read(self._own.keys)

    @property
    def values(self) -> Tensor:
        """Values of the sources of the running forward, [B, H, S, D], padded to the S tokens of the longest."""
        return self._read(self._own.values)

    def _read(self, storage: Tensor | None) -> Tensor:
        assert self.plan is not None and storage is not None
        num_rows, width = self.plan.shape
        flat = storage.flatten(0, 1)  # [tokens, H, D], a view
        if self.plan.start is not None:
            return flat[self.plan.start : self.plan.start + width].transpose(0, 1).unsqueeze(0)  # [1, H, S, D]
        gathered = flat.index_select(0, self.plan.gather)  # [B * S, H, D]
        return gathered.view(num_rows, width, *gathered.shape[1:]).transpose(1, 2)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the sources' keys and values, [B, H, S, D] with S tokens of the longest. Return them unchanged."""
        assert self.plan is not None
        write_to = self.plan.gather.index_select(0, self.plan.columns)  # [N]
        for storage, states in ((self._own.keys, key_states), (self._own.values, value_states)):
            assert storage is not None, "a layer attends to its own tokens first"
            columns = states.transpose(1, 2).flatten(0, 1)  # [B * S, H, D]
            storage.flatten(0, 1).index_copy_(0, write_to, columns.index_select(0, self.plan.columns))
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the self-attention cache has allocated the storages."""

    def get_seq_length(self) -> int:
        """Return 0: this cache has no tokens of the decoder, only sources. Called by transformers."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number S of columns of a mask over the sources and the index of the first column, (S, 0). Called
        by transformers.
        """
        if self.plan is None:
            return 0, 0
        return self.plan.shape[1], 0

    def get_max_length(self) -> int:
        """Return -1, which means to transformers that the cache has no maximum length."""
        return -1


class CrossAttention:
    """Runs the encoder of a model, and prepares the forwards in which the decoder reads the encoded sources."""

    def __init__(self, model: PreTrainedModel, *, sets_positions: bool = True) -> None:
        """sets_positions: whether positions and distances are taken from the rows, if the decoder's class allows it;
        False = the decoder counts columns.
        """
        self._sets_positions = sets_positions
        self._encoder = model.get_encoder()
        self._decoder = model.get_decoder()
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._positions = DecoderPositions(self._decoder)
        self._distances = DecoderDistances(self._decoder)

    @property
    def needs_positions(self) -> bool:
        """Whether the decoder is given the true positions of its tokens, or the distances between them. False = it
        takes a token's column in the batch for its position.
        """
        return self._sets_positions and (self._positions.is_supported or self._distances.is_supported)

    def set_cache(self, own: BlockCache) -> None:
        """Store the keys and values of sources in the blocks of this cache from now on."""
        self._own = own
        self._cross = Cache(layers=[CrossLayer(layer) for layer in own.layers])

    def encode(self, sources: Sequence[EncoderSource], device: torch.device) -> None:
        """Run the encoder over sources, and write their keys and values into the blocks that are reserved in their
        block tables. Sources of about the same length share a forward.

        Raises InvalidRequest for a token id outside the vocabulary.
        """
        width_of = group_widths(Counter(len(source.ids) for source in sources))
        groups: dict[int, list[EncoderSource]] = {}
        for source in sources:
            groups.setdefault(width_of[len(source.ids)], []).append(source)
        for group in groups.values():
            self._encode(SourcePlan.build(group, device, self._vocab_size))

    def _encode(self, plan: SourcePlan) -> None:
        # A decoder layer computes the sources' KV when it runs. It runs here over one token, of which nothing is kept.
        hidden = self._encoder(input_ids=plan.input_ids, attention_mask=plan.mask)[0]  # [B, S, hidden]
        self._own.begin(None)
        self._decoder(
            input_ids=plan.input_ids[:, :1],
            encoder_hidden_states=hidden,
            encoder_attention_mask=plan.mask,
            past_key_values=self._cache(plan, is_encoded=False),
            use_cache=True,
        )

    @contextmanager
    def forward(self, rows: Sequence[Row], plan: StepPlan, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Context manager for a forward of the whole model: yields the keyword arguments with which the model must be
        called.

        `rows`: the rows of the forward, whose sources are all encoded. `plan`: the plan of these rows. `arguments`: the
        keyword arguments for a model without an encoder. Within the context the decoder uses the positions of `rows`.
        """
        sources = [row.source for row in rows if row.source is not None]
        device = plan.input_ids.device
        source_plan = SourcePlan.build(sources, device, self._vocab_size)
        # Stands for the encoder's output, which no layer reads: its KV is in the blocks.
        unread = torch.zeros(1, 1, 1, device=device).expand(*source_plan.shape, 1)  # [B, S, 1]
        with ExitStack() as stack:
            if self._sets_positions:
                stack.enter_context(self._positions.using(plan.position_ids))
                stack.enter_context(self._distances.using(rows, plan))
            yield {
                **arguments,
                "decoder_input_ids": arguments["input_ids"],
                "decoder_attention_mask": arguments["attention_mask"],
                "input_ids": None,
                "attention_mask": source_plan.mask,
                "encoder_outputs": MoEModelOutput(last_hidden_state=unread),
                "past_key_values": self._cache(source_plan, is_encoded=True),
            }

    def _cache(self, plan: SourcePlan, *, is_encoded: bool) -> EncoderDecoderCache:
        for layer in self._cross.layers:
            layer.plan = plan
        cache = EncoderDecoderCache(self._own, self._cross)
        cache.is_updated = dict.fromkeys(range(len(self._cross.layers)), is_encoded)
        return cache


class DecoderPositions:
    """Hooks that give a decoder with an embedding of positions the true positions of its tokens. Only the `dense` path
    uses them.

    Such a decoder takes the column of a token in the batch for its position, even in a sequence that padding precedes.
    The hooks are on its module `embed_positions`, which all classes like BART have by this name.
    """

    def __init__(self, decoder: nn.Module) -> None:
        module = getattr(decoder, "embed_positions", None)
        self.is_supported = isinstance(module, nn.Module)
        """Whether the decoder has a module `embed_positions`; without it no positions can be set."""
        self._position_ids: Tensor | None = None
        if isinstance(module, nn.Module):
            module.register_forward_pre_hook(self._add_positions, with_kwargs=True)
            module.register_forward_hook(self._shape)

    @contextmanager
    def using(self, position_ids: Tensor) -> Iterator[None]:
        """Context manager: a forward within it uses these positions of each sequence's q new tokens, [B, q] int64."""
        self._position_ids = position_ids
        try:
            yield
        finally:
            self._position_ids = None

    def _add_positions(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if self._position_ids is None:
            return None
        return args, {**kwargs, "position_ids": self._position_ids}

    def _shape(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        # A class may take [B, q] for the positions of one row, and add a dimension in front.
        if self._position_ids is None:
            return None
        return output.reshape(*self._position_ids.shape, -1)  # [B, q, hidden]


class DecoderDistances:
    """Hook that gives the true distances between tokens to a decoder whose attention has a bias by distance (such as
    T5).

    Such a decoder takes the difference of two columns in the batch for a distance. That is right for chains, wherever
    they begin, and wrong for token trees.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.is_supported = False
        """Whether the decoder's attention has a bias by distance; without it no distances can be set."""
        self._distances: Tensor | None = None
        for module in decoder.modules():
            if getattr(module, "has_relative_attention_bias", False):
                module.compute_bias = partial(self._bias, module.compute_bias)
                self.is_supported = True

    @contextmanager
    def using(self, rows: Sequence[Row], plan: StepPlan) -> Iterator[None]:
        """Context manager: if one of these rows has a token tree, a forward within it uses the distances between the
        rows' positions. Otherwise it changes nothing.
        """
        if self.is_supported and has_trees(rows):
            key_positions = np.zeros((len(rows), plan.kv_len), dtype=np.int64)  # [B, L]
            for row_positions, row in zip(key_positions, rows, strict=True):
                row_positions[plan.kv_len - row.num_tokens :] = row.positions(0)
            keys = to_device(key_positions, plan.position_ids.device)
            self._distances = plan.position_ids[:, :, None] - keys[:, None, :]  # [B, q, L]
        try:
            yield
        finally:
            self._distances = None

    def _bias(
        self, own: Callable[..., Tensor], query_length: int, key_length: int, *, past_seen_tokens: int, **rest: Any
    ) -> Tensor:
        # Without a tree by columns, [1, heads, q, L]; with one by positions, [B, heads, q, L].
        if self._distances is None:
            return own(query_length, key_length, past_seen_tokens=past_seen_tokens, **rest)
        # The bias of the last of L tokens has every distance from 0 to L - 1: flipped, its index is the distance.
        by_distance = own(1, key_length, past_seen_tokens=key_length - 1, **rest)[0, :, 0].flip(-1)  # [heads, L]
        # A negative distance is that to a later key, which is masked.
        return by_distance[:, self._distances.clamp(0, key_length - 1)].transpose(0, 1)
