"""The `fused` path: a forward of our own in C++, on a CPU, for decoders like Llama's and Gemma's.

Created by `attention_choice`. Weights are packed at load and read once a step; keys and values are read from their
blocks. Every sum has a fixed order, so that a token's logits have the same bits in every batch, with any number of
draft tokens, however the prompt is divided, and with any number of threads. In bfloat16 only the weights, the cache and
the inputs of products are rounded; everything else, including the logits, is float32.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.attention.fused_weights import CLASSES, FusedShape, pack_weights
from outrider.engine.errors import PathUnavailable
from outrider.engine.memory import new_storage
from outrider.engine.model_facts import ModelFacts
from outrider.engine.native.library import NativeModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest

PADDED = 16
"""Multiple to which the width of attention's values and of hidden states is padded in memory. The kernels are compiled
for it."""


class FusedPath:
    """Attention path that runs Llama-like models in C++ on a CPU; `fused_weights.CLASSES` lists their classes.
    Implements the interfaces `ForwardPath`, `TreePath`, `FeaturePath` and `RepackedPath`.
    """

    name = "fused"
    batch_invariant = True
    block_size = BLOCK_SIZE

    def __init__(self, model: PreTrainedModel, facts: ModelFacts) -> None:
        """Pack the model's weights. Raises a PathUnavailable that names the part of the model that C++ does not
        compute.
        """
        if type(model).__name__ not in CLASSES:
            raise PathUnavailable(f"is made for {', '.join(CLASSES)}")
        shape = FusedShape.of(model, model.model, facts)
        self._hold(shape, *pack_weights(model.model, model.lm_head, shape))

    def _hold(self, shape: FusedShape, native: NativeModel, embedding: Tensor | None) -> None:
        self._shape = shape
        self._native = native
        self._embedding = embedding
        self._keys = self._values = torch.empty(0)
        self._num_taps = 0
        self.features = torch.empty(0)

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self._shape
        numbers_per_head = shape.head_size + _padded(shape.head_size)  # keys and values
        return shape.num_layers * shape.kv_heads * numbers_per_head * shape.dtype.itemsize

    @property
    def weights_bytes(self) -> int:
        num_bytes = self._native.weight_bytes
        if self._embedding is not None:
            num_bytes += self._embedding.nbytes
        return num_bytes

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        assert block_size == BLOCK_SIZE, f"blocks of {block_size} tokens, the kernels are made for {BLOCK_SIZE}"
        shape = self._shape
        per_layer = (shape.num_layers, num_blocks + 1, shape.kv_heads)
        padded = _padded(shape.head_size)
        self._keys = self._values = torch.empty(0)  # free the old storage first: memory may not suffice for both
        # [layers, blocks, Hkv, D, tokens] and [layers, blocks, Hkv, tokens, padded D]
        self._keys = new_storage((*per_layer, shape.head_size, BLOCK_SIZE), shape.dtype, torch.device("cpu"))
        self._values = new_storage((*per_layer, BLOCK_SIZE, padded), shape.dtype, torch.device("cpu"))
        self._native.storage(self._embedding, self._keys, self._values, num_blocks + 1)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            for storage in (self._keys, self._values):
                storage[:, destination].copy_(storage[:, source])

    def move_tokens(self, from_indices: Sequence[int], to_indices: Sequence[int]) -> None:
        read, written = torch.tensor([from_indices, to_indices])  # [N] each
        blocks, offsets = read // BLOCK_SIZE, read % BLOCK_SIZE
        to_blocks, to_offsets = written // BLOCK_SIZE, written % BLOCK_SIZE
        self._keys[:, to_blocks, :, :, to_offsets] = self._keys[:, blocks, :, :, offsets]
        self._values[:, to_blocks, :, to_offsets] = self._values[:, blocks, :, offsets]

    def set_taps(self, taps: Sequence[int]) -> None:
        self._native.taps(taps)
        self._num_taps = len(taps)
        self.features = torch.empty(0)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        return self._run(rows)

    def _run(self, rows: Sequence[Row], read: Tensor | None = None) -> Tensor:
        """Return the logits [N, lm_head_rows] float32 of the rows' last positions.

        read: states that layer 0 of a paired model reads with the T new tokens, [T, d] float32; else None.
        """
        ids: list[int] = []
        numbers: list[int] = []  # five for each row
        blocks: list[int] = []
        parents: list[int] = []
        num_logits = 0
        for row in rows:
            table = row.table.blocks
            ids += row.new_ids
            nodes = row.parents or ()
            numbers += (len(row.new_ids), row.num_cached, row.num_logits, len(table), len(nodes))
            blocks += table
            parents += nodes
            num_logits += row.num_logits
        try:
            plan = array("i", ids + numbers + blocks + parents)
        except OverflowError:  # an id that is no int32
            raise self._outside(self._first_outside(ids)) from None
        logits = torch.empty(num_logits, self._shape.lm_head_rows)  # [N, V] float32
        features = None
        if self._num_taps:
            features = torch.empty(len(ids), self._num_taps, _padded(self._shape.hidden))  # [T, taps, padded d] float32
        bad = self._native.forward(plan, len(ids), len(rows), logits, features, read)
        if bad is not None:
            raise self._outside(ids[bad])
        if features is not None:
            self.features = features[..., : self._shape.hidden]
        return logits

    def _first_outside(self, ids: Sequence[int]) -> int:
        for token_id in ids:
            if not 0 <= token_id < self._shape.vocab:
                return token_id
        raise AssertionError("all ids are in the vocabulary")

    def _outside(self, token_id: int) -> InvalidRequest:
        return InvalidRequest(
            f"token id {token_id} is outside the vocabulary, 0 to {self._shape.vocab - 1}", param="token_ids"
        )


def _padded(columns: int) -> int:
    return -(-columns // PADDED) * PADDED
