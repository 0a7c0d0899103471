"""The tensors of one forward over packed tokens: all new tokens of all rows in one line, and where each row's KV lies.

`PagedPath` builds a plan for each forward from integers on the host, and attention backends (`PagedAttention`) read it.
No token is padding, so rows of different widths share a forward at no cost.

    row a: 4 cached, 1 new, blocks [7, 2]    row b: 1 cached, 2 new, block [5]    block_size 4

    packed tokens  a4 b1 b2      position_ids  4 1 2      cu_seq_q   0 1 3
    block_table    [[7, 2],      kv_lens       5 3        cu_seq_kv  0 5 8
                    [5, 0]]      write_to      8 21 22    (2 * 4 + 0, 5 * 4 + 1, 5 * 4 + 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.step_plan import Row, check_ids, has_trees


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One sequence of a forward: which of the packed tokens (the concatenated new tokens of all sequences) are its own,
    and its blocks.
    """

    start: int
    """Index of the sequence's first new token among the new tokens of all sequences."""
    num_new: int
    """Number of the sequence's new tokens."""
    kv_len: int
    """Number of the sequence's tokens, cached and new, which is the number of keys that its last token attends to."""
    blocks: Sequence[int]
    """Numbers of the sequence's blocks in order, enough for kv_len tokens. This is the block table's own list: read it
    during this forward only."""
    parents: Sequence[int] | None = None
    """For each node of the sequence's token tree the index of its parent node; -1 = its parent is the token before the
    tree. None for a chain."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Where a forward of B sequences writes keys and values of their T new tokens, and which blocks each reads.

    Tensors are on the model's device; `rows` is on the host.
    """

    input_ids: Tensor
    """Token ids of the T new tokens of all sequences, [1, T] int64."""
    position_ids: Tensor
    """Positions of the T new tokens of all sequences, [1, T] int64."""
    cu_seq_q: Tensor
    """Index of each sequence's first new token among the T new tokens of all, followed by T, [B + 1] int32."""
    kv_lens: Tensor
    """Number of tokens of each sequence, cached and new, [B] int32."""
    cu_seq_kv: Tensor
    """Cumulative sums of kv_lens, beginning with 0, [B + 1] int32: the index at which each sequence's keys begin if the
    keys of all sequences are concatenated."""
    block_table: Tensor
    """Block numbers of each sequence, [B, max_blocks] int32, filled up with the trash block."""
    write_to: Tensor
    """Storage index of each of the T new tokens, block * block_size + offset, [T] int64."""
    logits_at: Tensor
    """Indices, among the T new tokens of all sequences, of the N tokens whose logits are returned, in the order of the
    sequences, [N] int64."""
    gather: Tensor | None
    """Storage indices of the S keys of all sequences, concatenated, [S] int64; None if `build` was called without
    `needs_gather`."""
    max_q: int
    """Largest number of new tokens of a sequence."""
    max_kv: int
    """Largest number of tokens of a sequence, cached and new."""
    block_size: int
    """Number of tokens in a block."""
    rows: tuple[PackedRow, ...]
    """The sequences of the forward, in order, on the host."""

    @property
    def num_tokens(self) -> int:
        """T, the number of new tokens of all sequences together."""
        return self.input_ids.shape[1]

    @classmethod
    def build(
        cls, rows: Sequence[Row], device: torch.device, vocab_size: int, *, needs_gather: bool = False
    ) -> PagedPlan:
        """Return the plan of a forward over at least one row. Blocks for the new tokens must be reserved in the rows'
        block tables. needs_gather: whether to set the plan's `gather`; False = it is None.

        Raises InvalidRequest for a token id that is not below `vocab_size`: on a GPU it would end the process.
        """
        packed = _pack(rows)
        ids = np.concatenate([np.asarray(row.new_ids, dtype=np.int64) for row in rows])  # [T]
        check_ids(ids, vocab_size)
        tokens, positions = _tokens_and_positions(rows)
        num_new = np.array([row.num_new for row in packed], dtype=np.int64)  # [B]
        kv_lens = np.array([row.kv_len for row in packed], dtype=np.int64)  # [B]
        table = _block_table(packed)  # [B, max_blocks]
        block_size = rows[0].table.block_size
        arrays = [ids, positions, _storage_indices(table, num_new, tokens, block_size), _logit_indices(rows)]
        if needs_gather:
            keys = np.concatenate([np.arange(kv_len) for kv_len in kv_lens])  # [S], indices in the rows
            arrays.append(_storage_indices(table, kv_lens, keys, block_size))
        arrays += [_cumulative(num_new), kv_lens.astype(np.int32), _cumulative(kv_lens), table]
        tensors = _to_device(arrays, device)
        ids_t, positions_t, write_to, logits_at = tensors[:4]
        cu_seq_q, kv_lens_t, cu_seq_kv, block_table = tensors[-4:]
        gather = None
        if needs_gather:
            gather = tensors[4]
        return cls(
            input_ids=ids_t[None],
            position_ids=positions_t[None],
            cu_seq_q=cu_seq_q,
            kv_lens=kv_lens_t,
            cu_seq_kv=cu_seq_kv,
            block_table=block_table,
            write_to=write_to,
            logits_at=logits_at,
            gather=gather,
            max_q=int(num_new.max()),
            max_kv=int(kv_lens.max()),
            block_size=block_size,
            rows=tuple(packed),
        )


def _pack(rows: Sequence[Row]) -> list[PackedRow]:
    packed: list[PackedRow] = []
    start = 0
    for row in rows:
        packed.append(PackedRow(start, row.num_new, row.num_tokens, row.table.blocks, row.parents))
        start += row.num_new
    return packed


def _tokens_and_positions(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    # The new tokens' indices in their rows, which are their positions in a chain, and their positions. [T] int64 each
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    for row in rows:
        indices = np.arange(row.num_cached, row.num_tokens)
        tokens.append(indices)
        if row.parents is None:
            positions.append(indices)
        else:
            positions.append(row.positions(row.num_cached))
    if not has_trees(rows):
        line = np.concatenate(tokens)
        return line, line
    return np.concatenate(tokens), np.concatenate(positions)


def _logit_indices(rows: Sequence[Row]) -> np.ndarray:
    # Rows of (num_new, num_logits) (3, 1) and (2, 2): [2, 3, 4]
    indices: list[np.ndarray] = []
    end = 0
    for row in rows:
        end += row.num_new
        indices.append(np.arange(end - row.num_logits, end))
    return np.concatenate(indices)  # [N] int64


def _storage_indices(table: np.ndarray, counts: np.ndarray, tokens: np.ndarray, block_size: int) -> np.ndarray:
    """Return the storage indices of tokens of several rows, [N] int64.

    tokens: their indices in their rows, [N], those of each row together. counts: how many of them each row has, [B].
    table [[7, 2], [5, 0]], counts [1, 2], tokens [4, 1, 2], block_size 4: [8, 21, 22]
    """
    blocks = table[np.repeat(np.arange(len(counts)), counts), tokens // block_size].astype(np.int64)
    return blocks * block_size + tokens % block_size


def _cumulative(counts: np.ndarray) -> np.ndarray:
    # [1, 2] -> [0, 1, 3], int32
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)


def _block_table(rows: Sequence[PackedRow]) -> np.ndarray:
    # [B, max_blocks] int32
    table = np.full((len(rows), max(len(row.blocks) for row in rows)), TRASH_BLOCK, dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.blocks)] = row.blocks
    return table


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    # On a GPU all arrays travel in one copy. Those of int64 come first, so that every view is aligned.
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat = torch.from_numpy(np.frombuffer(b"".join(array.tobytes() for array in arrays), dtype=np.uint8).copy())
    flat = flat.pin_memory().to(device, non_blocking=True)  # [bytes] uint8
    tensors: list[Tensor] = []
    offset = 0
    for array in arrays:
        dtype = torch.int64 if array.itemsize == 8 else torch.int32
        tensors.append(flat[offset : offset + array.nbytes].view(dtype).view(array.shape))
        offset += array.nbytes
    return tensors


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of the attention of one layer."""

    scaling: float
    """Factor by which products of queries and keys are multiplied before the softmax."""
    window: int | None = None
    """Maximum number of keys that a query attends to, its own included (sliding window); None = no limit."""
    chunk: int | None = None
    """Number of positions in a chunk: a query attends only to keys of its own chunk (Llama 4); None = there are no
    chunks."""
    softcap: float | None = None
    """Bound on the attention scores: a score x becomes softcap * tanh(x / softcap); None = scores are not bounded."""
    sinks: Tensor | None = None
    """[Hq], for each query head an extra score in the softmax, without a value: it lowers the weights of all keys
    (gpt-oss). None = there are no such scores."""
    causal: bool = True
    """Whether a query attends only to its own key and earlier ones. False = all new tokens of a sequence attend to each
    other; a window then extends to both sides, and no sequence may have a tree."""


class PagedAttention(Protocol):
    """Backend that computes attention over the blocks. One object serves every layer and forward of a model."""

    def begin(self, plan: PagedPlan) -> None:
        """Prepare for a forward with this plan, before its layers call `attend` with the same plan."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
        """Compute attention for query [T, Hq, D], of T new tokens and Hq query heads, over the storages of keys and
        values. Return the output [T, Hq, Dv], Dv being the width of a value.

        keys: [num_blocks + 1, block_size, Hkv, D]. values: [num_blocks + 1, block_size, Hkv, Dv]. Both already contain
        the new tokens' keys and values, of Hkv KV heads. Query head h reads KV head h // (Hq / Hkv). Raises
        NotImplementedError, at the self-test, for an option that the backend does not have.
        """

    def attend_gathered(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions
    ) -> Tensor:
        """Compute attention for query [T, Hq, D], of T new tokens and Hq query heads, over S concatenated keys. Return
        the output [T, Hq, Dv], Dv being the width of a value.

        keys: [S, Hkv, D], values: [S, Hkv, Dv], of all sequences and Hkv KV heads; `plan.cu_seq_kv` has the index at
        which each sequence begins. This serves latent attention (MLA), whose blocks contain latents: the model reads
        the latents and computes keys and values from them.
        """
