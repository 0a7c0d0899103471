"""Plan one forward of the `dense` path on the host: which rows share it, which ids go in, where KV is read and written.

Rows are aligned to the right as a whole, past and new together, so a token's column differs from its position only by
an offset per row. That is what lets relative schemes (ALiBi, T5 buckets) and transformers' own mask code work
unchanged. A row with fewer new tokens than the widest feeds tokens it already has again; their KV is not written twice.
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
"""Positions of a slot in a full step, for the estimate of its memory: the default K and one. Doubling it leaves
less to the cache."""
FORWARD_COST_TOKENS = 32
"""Tokens whose cost equals a forward's fixed cost (reading the weights, launching). Doubling it puts rows of more
different widths into one forward. Measured on CPU: 30 at 1024 x 2816, float32."""


@dataclass(frozen=True, slots=True)
class Source:
    """What the encoder of an encoder-decoder model reads for a row, and where its cross-attention KV lies.

    The KV of a source token is as large as that of a decoder's token, and lies in blocks of the same pool.
    """

    table: BlockTable
    """Blocks of its KV, as many as hold its tokens, all of them full; none until it is encoded."""
    ids: Sequence[int]
    """At least one."""

    @property
    def num_stored(self) -> int:
        """Tokens that its blocks are taken for: whole blocks, as the prefix cache knows them."""
        size = self.table.block_size
        return -(-len(self.ids) // size) * size


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a forward."""

    table: BlockTable
    new_ids: Sequence[int]
    """Tokens to feed; none where the source is to be encoded, which is all that the forward then does for the row."""
    num_cached: int
    """Tokens before them, whose KV is in the cache."""
    num_logits: int
    """Positions, counted from the end, whose logits are wanted; 0 for a piece of a prompt."""
    past_ids: Sequence[int]
    """Begins with the cached tokens; lent, not copied, and not read past num_cached."""
    parents: Sequence[int] | None = None
    """Parents of a token tree (see `token_tree`), which the last len(parents) tokens are, all new ones among them;
    its nodes that were fed before are in the cache. None when every token follows the one before it."""
    features: Tensor | None = None
    """[num_new, d], a row for each new token that a head reads beside it; None for models. A head that fills blocks
    reads, of the first new tokens, these in place of ids; those without are its block."""
    source: Source | None = None
    """What it attends to across; None for decoder-only models."""

    @classmethod
    def of(
        cls,
        table: BlockTable,
        token_ids: Sequence[int],
        num_cached: int,
        num_logits: int,
        source: Source | None = None,
    ) -> Row:
        """Return a row of all tokens up to the end of the feed; the new ones are copied."""
        return cls(table, token_ids[num_cached:], num_cached, num_logits, token_ids, source=source)

    @property
    def num_new(self) -> int:
        return len(self.new_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end of this feed."""
        return self.num_cached + len(self.new_ids)

    @property
    def tree_start(self) -> int:
        """Tokens before the tree; all of them when there is none."""
        return self.num_tokens - len(self.parents or ())

    def positions(self, first: int) -> np.ndarray:
        """Return the positions of the tokens from `first` on, [num_tokens - first] int64."""
        if self.parents is None:
            return np.arange(first, self.num_tokens)
        return positions(self.num_tokens, self.parents)[first:]

    def last_ids(self, count: int) -> list[int]:
        """Return its last `count` tokens, at most num_tokens: a wide plan feeds some of the cached ones again."""
        num_again = count - len(self.new_ids)
        again = self.past_ids[self.num_cached - num_again : self.num_cached] if num_again > 0 else ()
        return [*again, *self.new_ids[max(0, -num_again) :]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The tensors of one forward over B rows, q columns wide, with L columns of KV. Storage indices count tokens."""

    input_ids: Tensor  # [B, q] int64
    position_ids: Tensor  # [B, q] int64
    attention_mask: Tensor | None
    """[B, L] int64, 0 on padding; None when no row is padded."""
    kv_len: int
    """L, tokens."""
    start: int | None
    """First storage index of a single row that lies in consecutive blocks: it is read in place, without a copy."""
    gather: Tensor | None
    """[B * L] int64, storage indices to read; None with `start`."""
    write_to: Tensor | None
    """[N] int64, storage indices of the new tokens; None with `start`."""
    write_from: Tensor | None
    """[N] int64, indices into the B * q columns; None when every column is new."""

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_queries(self) -> int:
        return self.input_ids.shape[1]

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, vocab_size: int) -> StepPlan:
        """Build the plan of rows whose tables are reserved, each with at least as many tokens as the widest has new
        ones.

        Raises InvalidRequest for a token id outside the vocabulary: on a GPU it would take the process down.
        """
        width, kv_len = max(row.num_new for row in rows), max(row.num_tokens for row in rows)
        ids = np.array([row.last_ids(width) for row in rows], dtype=np.int64)  # [B, q]
        check_ids(ids, vocab_size)
        padding = np.array([kv_len - row.num_tokens for row in rows], dtype=np.int64)  # [B]
        places = np.stack([row.positions(row.num_tokens - width) for row in rows])  # [B, q]
        mask = None
        if padding.any():
            mask = (np.arange(kv_len)[None, :] >= padding[:, None]).astype(np.int64)  # [B, L]
        start = consecutive_start(rows[0].table) if len(rows) == 1 else None
        gather = write_to = write_from = None
        if start is None:
            gather, write_to, write_from = _storage_indices(rows, width, kv_len)
        tensors = _to_device((ids, places, mask, gather, write_to, write_from), device)
        ids_t, positions_t, mask_t, gather_t, write_to_t, write_from_t = tensors
        assert ids_t is not None and positions_t is not None
        return cls(ids_t, positions_t, mask_t, kv_len, start, gather_t, write_to_t, write_from_t)


def consecutive_start(table: BlockTable) -> int | None:
    """Return where a table begins, counted as in `storage_indices`, if its tokens follow each other; None if not."""
    first = table.blocks[0]
    return first * table.block_size if table.blocks == list(range(first, first + len(table.blocks))) else None


def group_rows(rows: Sequence[Row], *, of_equal_length: bool = False) -> list[list[int]]:
    """Return the indices of the rows that share a forward, so that a long prompt does not widen every decode row.

    of_equal_length: rows of different lengths share none, for models that take a column for a position.
    """
    if not of_equal_length:
        return _group_widths_of(rows, list(range(len(rows))))
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_length.setdefault(row.num_tokens, []).append(index)
    groups: list[list[int]] = []
    for indices in by_length.values():
        groups += _group_widths_of(rows, indices)
    return groups


def _group_widths_of(rows: Sequence[Row], rest: list[int]) -> list[list[int]]:
    """Return the indices `rest` of the rows in groups.

    Minimises padded columns plus FORWARD_COST_TOKENS a forward, over groups of neighbouring widths. A row too short to
    fill its group's width with its own tokens goes to a narrower one: no column is ever mere padding.
    """
    groups: list[list[int]] = []
    while rest:
        widths = Counter(rows[i].num_new for i in rest)
        if len(widths) == 1:
            return [*groups, rest]
        group_of = group_widths(widths)  # {width: its group's width}
        members: dict[int, list[int]] = {}
        short: list[int] = []
        for i in rest:
            width = group_of[rows[i].num_new]
            (members.setdefault(width, []) if rows[i].num_tokens >= width else short).append(i)
        groups.extend(members.values())
        rest = short
    return groups


def group_widths(counts: Counter[int]) -> dict[int, int]:
    """Return the cheapest partition of the distinct widths, widest first, by dynamic programming."""
    widths = sorted(counts, reverse=True)
    best: list[tuple[int, int]] = [(0, 0)]  # per number of widths placed: (cost, where the last group begins)
    for end in range(1, len(widths) + 1):
        num_rows, options = 0, []
        for begin in range(end - 1, -1, -1):
            num_rows += counts[widths[begin]]
            options.append((best[begin][0] + FORWARD_COST_TOKENS + widths[begin] * num_rows, begin))
        best.append(min(options))
    group_of: dict[int, int] = {}
    end = len(widths)
    while end:
        begin = best[end][1]
        group_of.update(dict.fromkeys(widths[begin:end], widths[begin]))
        end = begin
    return group_of


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequest(f"token id {bad} is outside the vocabulary, 0 to {vocab_size - 1}", param="token_ids")


def _storage_indices(rows: Sequence[Row], width: int, kv_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return gather [B * L], write_to [N] and write_from [N], None when every column is new."""
    block_size = rows[0].table.block_size
    within = np.arange(block_size)
    gather = np.full((len(rows), kv_len), TRASH_BLOCK * block_size, dtype=np.int64)
    write_to, write_from = [], []
    for i, row in enumerate(rows):
        num_tokens = row.num_tokens
        blocks = np.array(row.table.blocks, dtype=np.int64)
        indices = (blocks[:, None] * block_size + within).reshape(-1)[:num_tokens]
        gather[i, kv_len - num_tokens :] = indices
        write_to.append(indices[row.num_cached :])
        write_from.append(np.arange((i + 1) * width - row.num_new, (i + 1) * width))
    all_new = all(row.num_new == width for row in rows)
    return gather.reshape(-1), np.concatenate(write_to), None if all_new else np.concatenate(write_from)


def _to_device(arrays: Sequence[np.ndarray | None], device: torch.device) -> list[Tensor | None]:
    """Copy all arrays to the device at once."""
    if device.type == "cpu":
        return [None if array is None else torch.from_numpy(array) for array in arrays]
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays if array is not None]))
    flat = flat.pin_memory().to(device, non_blocking=True)
    tensors: list[Tensor | None] = []
    offset = 0
    for array in arrays:
        tensors.append(None if array is None else flat[offset : offset + array.size].view(array.shape))
        offset += 0 if array is None else array.size
    return tensors
