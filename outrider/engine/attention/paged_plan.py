"""The tensors of one forward over packed tokens: all new tokens of all rows in one line, and where each row's KV lies.

`PagedPath` builds a plan for every forward from host integers alone, and attention backends (`PagedAttention`) read it.
No token is padding, so rows of any widths share a forward at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.step_plan import Row, check_ids


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One sequence's place in the line, and its blocks."""

    start: int
    """Index of its first new token among the T packed ones."""
    num_new: int
    kv_len: int
    """Tokens in the sequence, the new ones included: the last query sees this many keys."""
    blocks: Sequence[int]
    """Enough for kv_len tokens, in order. The table's own list: read it during this forward only."""
    parents: Sequence[int] | None = None
    """Parents of the nodes of a token tree, as in `Row`."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The tensors of one forward over B rows and T packed tokens, on the model's device, and their host twins."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    cu_seq_q: Tensor  # [B + 1] int32, where each row's new tokens begin among the T, and T
    kv_lens: Tensor  # [B] int32
    cu_seq_kv: Tensor  # [B + 1] int32, where each row's keys begin if those of all rows are laid in one line
    block_table: Tensor  # [B, max_blocks] int32, filled up with the trash block
    write_to: Tensor  # [T] int64, block * block_size + offset of every new token
    logits_at: Tensor  # [N] int64, which of the T positions have their logits wanted, rows in order
    gather: Tensor | None
    """[S] int64, the storage indices of all keys of all rows in one line; None unless asked for."""
    max_q: int
    max_kv: int
    block_size: int
    rows: tuple[PackedRow, ...]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, vocab_size: int, *, gathers: bool = False) -> PagedPlan:
        """Build the plan of at least one row, whose tables are reserved. gathers: make `gather` too.

        Raises InvalidRequest for a token id outside the vocabulary: on a GPU it would take the process down.
        """
        packed = _packed(rows)
        ids = np.concatenate([np.asarray(row.new_ids, dtype=np.int64) for row in rows])  # [T]
        check_ids(ids, vocab_size)
        places = np.concatenate([np.arange(row.num_cached, row.num_tokens) for row in rows])  # [T]
        positions = places
        if any(row.parents is not None for row in rows):
            positions = np.concatenate([row.positions(row.num_cached) for row in rows])  # [T]
        num_new = np.array([row.num_new for row in packed], dtype=np.int64)  # [B]
        kv_lens = np.array([row.kv_len for row in packed], dtype=np.int64)  # [B]
        table, block_size = _block_table(packed), rows[0].table.block_size
        ends = [row.start + row.num_new for row in packed]
        wanted = [np.arange(end - row.num_logits, end) for end, row in zip(ends, rows, strict=True)]
        arrays = [
            *(ids, positions, _indices(table, num_new, places, block_size), np.concatenate(wanted)),
            *([_indices(table, kv_lens, _ranges(kv_lens), block_size)] if gathers else []),
            *(_cumulative(num_new), kv_lens.astype(np.int32), _cumulative(kv_lens), table),
        ]
        tensors = _to_device(arrays, device)
        return cls(
            *(tensors[0][None], tensors[1][None], *tensors[-4:], tensors[2], tensors[3]),
            tensors[4] if gathers else None,
            *(int(num_new.max()), int(kv_lens.max()), block_size, tuple(packed)),
        )


def _packed(rows: Sequence[Row]) -> list[PackedRow]:
    packed, start = [], 0
    for row in rows:
        packed.append(PackedRow(start, row.num_new, row.num_tokens, row.table.blocks, row.parents))
        start += row.num_new
    return packed


def _indices(table: np.ndarray, counts: np.ndarray, places: np.ndarray, block_size: int) -> np.ndarray:
    """Return the storage indices [N] int64 of the tokens at `places` [N], of which each row has counts [B]."""
    blocks = table[np.repeat(np.arange(len(counts)), counts), places // block_size].astype(np.int64)
    return blocks * block_size + places % block_size


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Return 0 to n - 1 for every n of counts, one after the other."""
    return np.concatenate([np.arange(count) for count in counts])


def _cumulative(counts: np.ndarray) -> np.ndarray:
    """Return the sums [B + 1] int32 of counts [B], from 0."""
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)


def _block_table(rows: Sequence[PackedRow]) -> np.ndarray:
    """Return the rows' blocks [B, max_blocks] int32, filled up with the trash block."""
    table = np.full((len(rows), max(len(row.blocks) for row in rows)), TRASH_BLOCK, dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.blocks)] = row.blocks
    return table


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy all arrays to the device at once; the wide ones come first, so that every view is aligned."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat = torch.from_numpy(np.frombuffer(b"".join(array.tobytes() for array in arrays), dtype=np.uint8).copy())
    flat = flat.pin_memory().to(device, non_blocking=True)
    tensors, offset = [], 0
    for array in arrays:
        piece = flat[offset : offset + array.nbytes].view(torch.int64 if array.itemsize == 8 else torch.int32)
        tensors.append(piece.view(array.shape))
        offset += array.nbytes
    return tensors


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of a layer's attention beyond causality."""

    scaling: float
    """Factor on the products of queries and keys."""
    window: int | None = None
    """Most keys that a query sees, its own included (sliding window)."""
    chunk: int | None = None
    """Positions in a chunk; a query sees the keys of its own chunk only (Llama 4)."""
    softcap: float | None = None
    """Scores x become softcap * tanh(x / softcap)."""
    sinks: Tensor | None = None
    """[Hq], a score per head that takes part in the softmax and adds nothing to the output."""
    causal: bool = True
    """Whether no query sees a later key; else all new tokens of a row see each other, a window reaches both ways, and
    no row may be a tree."""


class PagedAttention(Protocol):
    """Attention over the blocks: one object per model, called for every layer of every forward."""

    def begin(self, plan: PagedPlan) -> None:
        """Prepare what the layers of a forward share. Called before the first of them."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
        """Attend with query [T, Hq, D] over keys [num_blocks + 1, block_size, Hkv, D] and values [..., Hkv, Dv].

        Returns [T, Hq, Dv]. The new tokens' KV is in the blocks already. Query head h reads KV head h // (Hq / Hkv).
        Raises NotImplementedError, at the self-test, for an option that the backend does not know.
        """

    def attend_gathered(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions
    ) -> Tensor:
        """Attend over keys [S, Hkv, D] and values [S, Hkv, Dv] of all rows in one line, as `cu_seq_kv` says.

        Serves latent attention (MLA): the blocks hold latents, of which the model makes keys after they are read.
        """
