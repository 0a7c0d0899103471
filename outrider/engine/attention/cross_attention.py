"""What the `dense` path adds for encoder-decoder models: their encoder, the KV of cross-attention, and positions.

A source's KV lies in blocks like those of the decoder's tokens. Each layer makes and writes it when the encoder has
run, and hands it back in forwards of the decoder, so that nothing else of the encoder is kept.
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
from outrider.engine.step_plan import Row, Source, StepPlan, check_ids, consecutive_start, group_widths


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The sources of the B rows of a forward, aligned to the left, S columns wide. Storage indices count tokens."""

    mask: Tensor | None
    """[B, S] int64, 0 on padding; None when no row is padded."""
    start: int | None
    """First storage index of a single row that lies in consecutive blocks: it is read in place, without a copy."""
    gather: Tensor
    """[B * S] int64, storage indices of all columns."""
    input_ids: Tensor
    """[B, S] int64, 0 on padding."""
    columns: Tensor
    """[N] int64, indices of the columns that are no padding."""
    shape: tuple[int, int]
    """(B, S)."""

    @classmethod
    def build(cls, sources: Sequence[Source], device: torch.device, vocab_size: int) -> SourcePlan:
        """Build the plan of sources whose tables are reserved.

        Raises InvalidRequest for a token id outside the vocabulary.
        """
        width = max(len(source.ids) for source in sources)
        sizes = np.array([len(source.ids) for source in sources])
        within = np.arange(width)[None, :] < sizes[:, None]  # [B, S]
        gather = np.full(within.shape, TRASH_BLOCK * sources[0].table.block_size, dtype=np.int64)
        ids = np.zeros(within.shape, dtype=np.int64)
        for row, source in enumerate(sources):
            gather[row, : sizes[row]] = source.table.storage_indices(range(len(source.ids)))
            ids[row, : sizes[row]] = source.ids
        check_ids(ids, vocab_size)

        def put(array: np.ndarray) -> Tensor:
            return to_device(array, device)

        return cls(
            mask=None if within.all() else put(within.astype(np.int64)),
            start=consecutive_start(sources[0].table) if len(sources) == 1 else None,
            gather=put(gather.reshape(-1)),
            input_ids=put(ids),
            columns=put(np.flatnonzero(within)),
            shape=(len(sources), width),
        )


class CrossLayer(CacheLayerMixin):
    """Reads and writes one layer's source KV, in the storage of the layer's own tokens."""

    plan: SourcePlan | None = None
    """The running forward's."""

    def __init__(self, own: BlockLayer) -> None:
        self._own = own  # no super().__init__: it would set what are properties here

    @property
    def keys(self) -> Tensor:
        """[B, H, S, D]."""
        return self._read(self._own.keys)

    @property
    def values(self) -> Tensor:
        """[B, H, S, D]."""
        return self._read(self._own.values)

    def _read(self, storage: Tensor | None) -> Tensor:
        assert self.plan is not None and storage is not None
        num_rows, width = self.plan.shape
        flat = storage.flatten(0, 1)  # [tokens, H, D], a view
        if self.plan.start is not None:
            return flat[self.plan.start : self.plan.start + width].transpose(0, 1).unsqueeze(0)
        gathered = flat.index_select(0, self.plan.gather)  # [B * S, H, D]
        return gathered.view(num_rows, width, *gathered.shape[1:]).transpose(1, 2)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write what was made of the encoder's output, [B, H, S, D] each, and return it."""
        assert self.plan is not None
        write_to = self.plan.gather.index_select(0, self.plan.columns)  # [N]
        for storage, states in ((self._own.keys, key_states), (self._own.values, value_states)):
            assert storage is not None, "a layer attends to its own tokens first"
            columns = states.transpose(1, 2).flatten(0, 1)  # [B * S, H, D]
            storage.flatten(0, 1).index_copy_(0, write_to, columns.index_select(0, self.plan.columns))
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 0 if self.plan is None else self.plan.shape[1], 0

    def get_max_length(self) -> int:
        return -1  # transformers' own word for "no limit"


class CrossAttention:
    """Encodes sources, and says what a forward of the whole model is given."""

    def __init__(self, model: PreTrainedModel, *, tells_places: bool = True) -> None:
        """tells_places: whether the decoder is told its tokens' positions and distances, where it can be."""
        self._tells_places = tells_places
        self._encoder, self._decoder = model.get_encoder(), model.get_decoder()
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._positions, self._distances = DecoderPositions(self._decoder), DecoderDistances(self._decoder)

    @property
    def places_tokens(self) -> bool:
        """Whether the decoder is told its tokens' positions, or how far they are apart."""
        return self._tells_places and (self._positions.are_told or self._distances.are_told)

    def set_cache(self, own: BlockCache) -> None:
        """Keep sources' KV in this cache's blocks from now on."""
        self._own, self._cross = own, Cache(layers=[CrossLayer(layer) for layer in own.layers])

    def encode(self, sources: Sequence[Source], device: torch.device) -> None:
        """Run the encoder over sources whose tables are reserved, those of about the same length together.

        Raises InvalidRequest for a token id outside the vocabulary.
        """
        width_of = group_widths(Counter(len(source.ids) for source in sources))
        groups: dict[int, list[Source]] = {}
        for source in sources:
            groups.setdefault(width_of[len(source.ids)], []).append(source)
        for group in groups.values():
            self._encode(SourcePlan.build(group, device, self._vocab_size))

    def _encode(self, plan: SourcePlan) -> None:
        """Each layer of the decoder makes its KV of the encoder's output when it is run: here over a token of no use,
        of which nothing is kept.
        """
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
        """Give the arguments of a forward of the model, of those that its decoder would be run with alone."""
        sources = [row.source for row in rows if row.source is not None]
        device = plan.input_ids.device
        across = SourcePlan.build(sources, device, self._vocab_size)
        unread = torch.zeros(1, 1, 1, device=device).expand(*across.shape, 1)  # of the encoder's output: its KV is here
        with ExitStack() as told:
            if self._tells_places:
                told.enter_context(self._positions.told(plan.position_ids))
                told.enter_context(self._distances.told(rows, plan))
            yield {
                **arguments,
                "decoder_input_ids": arguments["input_ids"],
                "decoder_attention_mask": arguments["attention_mask"],
                "input_ids": None,
                "attention_mask": across.mask,
                "encoder_outputs": MoEModelOutput(last_hidden_state=unread),
                "past_key_values": self._cache(across, is_encoded=True),
            }

    def _cache(self, plan: SourcePlan, *, is_encoded: bool) -> EncoderDecoderCache:
        for layer in self._cross.layers:
            layer.plan = plan
        cache = EncoderDecoderCache(self._own, self._cross)
        cache.is_updated = dict.fromkeys(range(len(self._cross.layers)), is_encoded)
        return cache


class DecoderPositions:
    """Tells a decoder with embedded positions where each row's tokens are: it counts the columns of all rows alike.

    It does so in our own forwards alone, by hooks on the module that all classes like BART call by the same name.
    """

    def __init__(self, decoder: nn.Module) -> None:
        module = getattr(decoder, "embed_positions", None)
        self.are_told = isinstance(module, nn.Module)
        self._position_ids: Tensor | None = None
        if isinstance(module, nn.Module):
            module.register_forward_pre_hook(self._ask, with_kwargs=True)
            module.register_forward_hook(self._shape)

    @contextmanager
    def told(self, position_ids: Tensor) -> Iterator[None]:
        """Use these positions [B, q] in the forward within."""
        self._position_ids = position_ids
        try:
            yield
        finally:
            self._position_ids = None

    def _ask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return None if self._position_ids is None else (args, {**kwargs, "position_ids": self._position_ids})

    def _shape(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return what is embedded as [B, q, hidden]: a class may take what it is told for one row's, and add one."""
        return None if self._position_ids is None else output.reshape(*self._position_ids.shape, -1)


class DecoderDistances:
    """Tells a decoder whose attention has a bias for distances how far apart the nodes of a token tree are.

    T5 and its like count columns, which does for chains wherever they lie, and not for trees.
    """

    def __init__(self, decoder: nn.Module) -> None:
        found = [module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False)]
        self.are_told = bool(found)
        self._distances: Tensor | None = None
        for module in found:
            module.compute_bias = partial(self._bias, module.compute_bias)

    @contextmanager
    def told(self, rows: Sequence[Row], plan: StepPlan) -> Iterator[None]:
        """Use the positions of these rows in the forward within, where there is a tree among them."""
        if self.are_told and any(row.parents is not None for row in rows):
            places = np.zeros((len(rows), plan.kv_len), dtype=np.int64)
            for own, row in zip(places, rows, strict=True):
                own[plan.kv_len - row.num_tokens :] = row.positions(0)
            keys = to_device(places, plan.position_ids.device)
            self._distances = plan.position_ids[:, :, None] - keys[:, None, :]  # [B, q, L]
        try:
            yield
        finally:
            self._distances = None

    def _bias(
        self, own: Callable[..., Tensor], query_length: int, key_length: int, *, past_seen_tokens: int, **rest: Any
    ) -> Tensor:
        """Return the bias by columns, [1, heads, q, L], or where there is a tree by positions, [B, heads, q, L]."""
        if self._distances is None:
            return own(query_length, key_length, past_seen_tokens=past_seen_tokens, **rest)
        line = own(1, key_length, past_seen_tokens=key_length - 1, **rest)[0, :, 0].flip(-1)  # [heads, L], by distance
        return line[:, self._distances.clamp(0, key_length - 1)].transpose(0, 1)  # what is ahead is masked
