"""The rows of a forward, and the plan of one on the `dense` path: which rows share it, where KV is read and written.

`Row` is what every path is given. The rest serves `dense`, which aligns rows to the right, past and new tokens
together. A token's column then differs from its position only by an offset per row, so that relative positions (ALiBi,
T5's buckets) and transformers' own masks work unchanged. A row with fewer new tokens than the widest feeds some of its
cached tokens again; their KV is not written twice.

    q = 2 columns are fed of L = 5:   row a, 4 cached and 1 new   a0 a1 a2 [a3 a4]   a3 is fed again
                                      row b, 1 cached and 2 new    -  - b0 [b1 b2]   two columns of padding
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_pool import TRASH_BLOCK, BlockTable
from outrider.engine.token_tree import positions
from outrider.wire.errors import InvalidRequest

VERIFY_TOKENS = 6
"""Number of tokens of each slot in the largest step for which memory is set aside: the default K, plus one."""
FORWARD_COST_TOKENS = 32
"""Number of tokens whose computation costs as much as a forward's fixed cost of reading the weights and launching. The
measured value is 30, on a CPU with weights of 1024 x 2816 in float32."""


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """Source of a row: the tokens that the encoder of an encoder-decoder model reads, and the blocks of their keys and
    values.

    The keys and values of a source token, for cross-attention, are as large as those of a decoder's token. They are
    stored in blocks of the same pool.
    """

    table: BlockTable
    """Blocks of the source's keys and values; empty until the source is encoded. Whole blocks are reserved, so that the
    prefix cache can publish the last one, too."""
    ids: Sequence[int]
    """Token ids of the source, at least one."""

    @property
    def num_stored(self) -> int:
        """Number of tokens that `table` reserves: the number of `ids`, rounded up to whole blocks."""
        size = self.table.block_size
        return -(-len(self.ids) // size) * size


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one sequence in a forward: those that are cached and those that are fed.

    Example: `Row(table, [7, 8], 5, 1, ids)` feeds the ids 7 and 8 after the 5 cached tokens of a sequence, `ids[:5]`,
    and requests the logits of the last 1 token.
    """

    table: BlockTable
    """Block table of the sequence."""
    new_ids: Sequence[int]
    """Token ids to feed. Empty if `source` is to be encoded: the forward then does nothing else for the row."""
    num_cached: int
    """Number of tokens before the new ones. Their keys and values are in the cache."""
    num_logits: int
    """Number of last tokens whose logits are returned; 0 for a chunk of a prompt that does not end it."""
    past_ids: Sequence[int]
    """List that begins with the cached tokens' ids. It may be longer than num_cached, such as the whole sequence."""
    parents: Sequence[int] | None = None
    """Index of each node's parent in a token tree, or -1 for the last token before the tree. The tree is the last
    len(parents) tokens: all new tokens, and before them nodes that were fed earlier and are in the cache. None = the
    tokens are a chain."""
    features: Tensor | None = None
    """Features that a head reads with the new tokens, [num_new, d]; None for models. A block head has features for the
    first new tokens alone, and reads these in place of their token ids. The other new tokens are the block that it
    fills."""
    source: EncoderSource | None = None
    """Source (input of the encoder) that the row attends to by cross-attention; None for decoder-only models."""

    @classmethod
    def of(
        cls,
        table: BlockTable,
        token_ids: Sequence[int],
        num_cached: int,
        num_logits: int,
        source: EncoderSource | None = None,
    ) -> Row:
        """Return a row that feeds `token_ids[num_cached:]` as a chain. Only these ids are copied."""
        return cls(table, token_ids[num_cached:], num_cached, num_logits, token_ids, source=source)

    @property
    def num_new(self) -> int:
        """Number of tokens to feed."""
        return len(self.new_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens after this forward, cached and new."""
        return self.num_cached + len(self.new_ids)

    @property
    def tree_start(self) -> int:
        """Number of tokens before the token tree; num_tokens if there is no tree."""
        return self.num_tokens - len(self.parents or ())

    def positions(self, first: int) -> np.ndarray:
        """Return the positions of the tokens from index `first` on, [num_tokens - first] int64."""
        if self.parents is None:
            return np.arange(first, self.num_tokens)
        return positions(self.num_tokens, self.parents)[first:]

    def last_ids(self, count: int) -> list[int]:
        """Return the last `count` token ids, of new and cached tokens together; `count` is at most num_tokens. A
        forward with wider rows needs them: it feeds some cached tokens again to fill the columns.
        """
        # past_ids [4, 5, 6], num_cached 3, new_ids [7]: last_ids(3) is [5, 6, 7]
        num_again = count - len(self.new_ids)
        if num_again <= 0:
            return [*self.new_ids[-num_again:]]
        return [*self.past_ids[self.num_cached - num_again : self.num_cached], *self.new_ids]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one `dense` forward over B rows: q columns of tokens, which attend to L columns of keys and values."""

    input_ids: Tensor
    """Token ids of the q columns of each of B rows that are fed, [B, q] int64."""
    position_ids: Tensor
    """Positions of the q tokens of each of B rows that are fed, [B, q] int64."""
    attention_mask: Tensor | None
    """[B, L] int64, L = `kv_len`: 0 for columns of padding, 1 for others; None if no row is padded."""
    kv_len: int
    """L, the number of tokens of the longest row."""
    start: int | None
    """Storage index of the first token, if the forward has a single row and its blocks have consecutive numbers. That
    row's keys and values are read in place, without a copy. None for other forwards."""
    gather: Tensor | None
    """Storage indices of the keys and values that are read, [B * L] int64, L = `kv_len`. Columns of padding read the
    trash block. None if `start` is set."""
    write_to: Tensor | None
    """Storage indices to which keys and values of the N new tokens are written, [N] int64; None if `start` is set."""
    write_from: Tensor | None
    """Indices of the N new tokens among the B * q that are fed (B rows of q), [N] int64. The others are cached
    tokens, fed again to fill a row. None if there are none, or if `start` is set."""

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return self.input_ids.shape[0]

    @property
    def num_queries(self) -> int:
        """q, the number of tokens fed for each row: the new tokens of the row with the most."""
        return self.input_ids.shape[1]

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, vocab_size: int) -> StepPlan:
        """Return the plan of a forward over rows whose block tables are reserved.

        Each row must have at least as many tokens, cached and new, as the widest row has new ones. Raises
        InvalidRequest for a token id outside the vocabulary: on a GPU it would end the process.
        """
        width = max(row.num_new for row in rows)
        kv_len = max(row.num_tokens for row in rows)
        ids = np.array([row.last_ids(width) for row in rows], dtype=np.int64)  # [B, q]
        check_ids(ids, vocab_size)
        padding = np.array([kv_len - row.num_tokens for row in rows], dtype=np.int64)  # [B]
        all_positions = np.stack([row.positions(row.num_tokens - width) for row in rows])  # [B, q] int64
        mask = None
        if padding.any():
            mask = (np.arange(kv_len)[None, :] >= padding[:, None]).astype(np.int64)  # [B, L]
        start = gather = write_to = write_from = None
        if len(rows) == 1:
            start = consecutive_start(rows[0].table)
        if start is None:
            gather, write_to, write_from = _storage_indices(rows, width, kv_len)
        tensors = _to_device((ids, all_positions, mask, gather, write_to, write_from), device)
        ids_t, positions_t, mask_t, gather_t, write_to_t, write_from_t = tensors
        assert ids_t is not None and positions_t is not None
        return cls(ids_t, positions_t, mask_t, kv_len, start, gather_t, write_to_t, write_from_t)


def consecutive_start(table: BlockTable) -> int | None:
    """Return the storage index of a table's first token if its blocks have consecutive numbers; None otherwise."""
    # block_size 16: blocks [3, 4, 5] give 48, blocks [3, 5] None
    first = table.blocks[0]
    if table.blocks != list(range(first, first + len(table.blocks))):
        return None
    return first * table.block_size


def group_rows(rows: Sequence[Row], *, of_equal_length: bool = False) -> list[list[int]]:
    """Divide the rows into groups, and return each group as a list of row indices. Each group is run in one forward, so
    that a long prompt does not widen every decode row.

    of_equal_length: whether only rows of equal length may share a forward, for models in which a token's position is
    its column in the batch.
    """
    if not of_equal_length:
        return _groups_by_width(rows, list(range(len(rows))))
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_length.setdefault(row.num_tokens, []).append(index)
    groups: list[list[int]] = []
    for indices in by_length.values():
        groups += _groups_by_width(rows, indices)
    return groups


def _groups_by_width(rows: Sequence[Row], remaining: list[int]) -> list[list[int]]:
    """Return the indices `remaining` of the rows in groups.

    A row with fewer tokens than its group is wide cannot fill the columns with its own tokens: it goes to a narrower
    group, so that no column that is fed is padding.
    """
    groups: list[list[int]] = []
    while remaining:
        counts = Counter(rows[index].num_new for index in remaining)
        if len(counts) == 1:
            groups.append(remaining)
            return groups
        width_of = group_widths(counts)
        members: dict[int, list[int]] = {}
        short: list[int] = []
        for index in remaining:
            width = width_of[rows[index].num_new]
            if rows[index].num_tokens >= width:
                members.setdefault(width, []).append(index)
            else:
                short.append(index)
        groups.extend(members.values())
        remaining = short
    return groups


def group_widths(counts: Counter[int]) -> dict[int, int]:
    """Choose groups of rows that share a forward, at the least total cost. Return the width of a row's group (the most
    new tokens of one of its rows) by the row's number of new tokens.

    counts: number of rows by their number of new tokens. A group costs FORWARD_COST_TOKENS, plus its width for each of
    its rows.
    """
    # {500: 1, 6: 4, 1: 3}: {500: 500, 6: 6, 1: 6}. The group of 6 and 1 costs 32 + 7 * 6 = 74, two groups 56 + 35 = 91
    widths = sorted(counts, reverse=True)
    best: list[tuple[int, int]] = [(0, 0)]  # for the first n widths: (cost, index at which the last group begins)
    for end in range(1, len(widths) + 1):
        num_rows = 0
        options: list[tuple[int, int]] = []
        for begin in range(end - 1, -1, -1):
            num_rows += counts[widths[begin]]
            options.append((best[begin][0] + FORWARD_COST_TOKENS + widths[begin] * num_rows, begin))
        best.append(min(options))
    width_of: dict[int, int] = {}
    end = len(widths)
    while end:
        begin = best[end][1]
        width_of.update(dict.fromkeys(widths[begin:end], widths[begin]))
        end = begin
    return width_of


def has_trees(rows: Sequence[Row]) -> bool:
    """Return whether one of the rows is a token tree."""
    return any(row.parents is not None for row in rows)


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise InvalidRequest if one of the token ids is not from 0 to vocab_size - 1."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequest(f"token id {bad} is outside the vocabulary, 0 to {vocab_size - 1}", param="token_ids")


def _storage_indices(rows: Sequence[Row], width: int, kv_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return gather [B * L], write_to [N] and write_from [N], None when every column is new; all int64.

    block_size 4, one row of 6 tokens in blocks [7, 2], the last new, width 1, L 6:
    gather [28, 29, 30, 31, 8, 9], write_to [9], write_from None
    """
    block_size = rows[0].table.block_size
    offsets = np.arange(block_size)
    gather = np.full((len(rows), kv_len), TRASH_BLOCK * block_size, dtype=np.int64)  # [B, L]
    write_to: list[np.ndarray] = []
    write_from: list[np.ndarray] = []
    num_new = 0
    for i, row in enumerate(rows):
        num_tokens = row.num_tokens
        blocks = np.array(row.table.blocks, dtype=np.int64)  # [num_blocks]
        indices = (blocks[:, None] * block_size + offsets).reshape(-1)[:num_tokens]  # [num_tokens]
        gather[i, kv_len - num_tokens :] = indices
        write_to.append(indices[row.num_cached :])
        write_from.append(np.arange((i + 1) * width - row.num_new, (i + 1) * width))
        num_new += row.num_new
    if num_new == len(rows) * width:
        return gather.reshape(-1), np.concatenate(write_to), None
    return gather.reshape(-1), np.concatenate(write_to), np.concatenate(write_from)


def _to_device(arrays: Sequence[np.ndarray | None], device: torch.device) -> list[Tensor | None]:
    # On a GPU all arrays travel in one copy.
    tensors: list[Tensor | None] = []
    if device.type == "cpu":
        for array in arrays:
            tensors.append(torch.from_numpy(array) if array is not None else None)
        return tensors
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays if array is not None]))
    flat = flat.pin_memory().to(device, non_blocking=True)
    offset = 0
    for array in arrays:
        if array is None:
            tensors.append(None)
            continue
        tensors.append(flat[offset : offset + array.size].view(array.shape))
        offset += array.size
    return tensors
