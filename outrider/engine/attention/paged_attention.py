"""Attention over blocks with torch alone: the backend of the `paged` path on CPU, and wherever nothing better is.

Long rows are read one by one, in place where their blocks are consecutive. Short rows of one width are read together,
padded, since a call's fixed cost would outweigh the copy. The query heads that share a KV head become query rows, so
that no key is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.attention.paged_plan import AttentionOptions, PackedRow, PagedPlan
from outrider.engine.host_copy import to_device
from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.token_tree import seen

TOGETHER_BYTES = 1 << 20
"""Bytes of padded keys up to which rows are read together. On CPU, 32 rows of 16 to 64 tokens cost 1.27 of the
`dense` path one by one and 1.0 together; from 1 MiB on nothing is gained, and fresh memory begins to cost."""
TOGETHER_BYTES_ON_DEVICE = 64 << 20
"""Bytes, as TOGETHER_BYTES, on a GPU, where a call's launch is dearer and copies are cheaper. Not measured."""
COLUMNS_ALIGNED = 16
"""Numbers of which a mask's row in memory is a multiple. torch copies a mask whose rows are not of 8 for each layer."""
TOGETHER_WIDTH = 16
"""New tokens a row. A row with more is a piece of a prompt, which is work enough for a call of its own."""


@dataclass(slots=True)
class _Group:
    """Rows of one width that are read together, or a single row."""

    rows: list[PackedRow]
    first_key: int | None
    """Storage index of a single row's first key when its blocks are consecutive."""
    gather: Tensor | None
    """[B * L] int64 storage indices of the keys, padded with trash; whole blocks for a single row."""
    kv_len: int
    """L, keys of the longest row."""
    packed: Tensor | None
    """[B * q] int64, the rows' places among the packed tokens; None when they follow one another."""
    masks: dict[tuple[int | None, int | None, bool, int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.rows[0].num_new

    @property
    def is_piece(self) -> bool:
        """Whether it is a piece of a prompt: a row of many tokens, and no tree."""
        return self.width > TOGETHER_WIDTH and self.rows[0].parents is None


class TorchAttention:
    """Attends with torch's scaled_dot_product_attention, group by group. Implements `PagedAttention`."""

    def __init__(self) -> None:
        self._groups: list[_Group] | None = None

    def begin(self, plan: PagedPlan) -> None:
        self._groups = None  # made at the first layer, which tells how large a token's keys are

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [tokens, Hkv, D], views
        if self._groups is None:
            most_bytes = TOGETHER_BYTES if query.device.type == "cpu" else TOGETHER_BYTES_ON_DEVICE
            parts = _partition(plan.rows, most_bytes // (keys[0].numel() * keys.element_size()))
            self._groups = [_group(rows, plan.block_size, query.device) for rows in parts]
        if len(self._groups) == 1 and self._groups[0].packed is None:
            return _attend_group(query, keys, values, self._groups[0], options)
        output = query.new_empty(*query.shape[:2], values.shape[-1])  # [T, Hq, Dv]
        for group in self._groups:
            if group.packed is None:
                first, last = group.rows[0], group.rows[-1]
                part = slice(first.start, last.start + last.num_new)
                output[part] = _attend_group(query[part], keys, values, group, options)
            else:
                picked = query.index_select(0, group.packed)
                output.index_copy_(0, group.packed, _attend_group(picked, keys, values, group, options))
        return output

    def attend_gathered(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions
    ) -> Tensor:
        output, start = query.new_empty(*query.shape[:2], values.shape[-1]), 0
        for row in plan.rows:
            group, end = _Group([row], start, None, row.kv_len, None), start + row.kv_len
            part = slice(row.start, row.start + row.num_new)
            output[part] = _attend_group(query[part], keys, values, group, options)
            start = end
        return output


def _partition(rows: tuple[PackedRow, ...], most_keys: int) -> list[list[PackedRow]]:
    """Return the rows in lists that are read together: of one width, and at most most_keys keys in all, padded."""
    if len(rows) == 1:
        return [list(rows)]
    by_width: dict[int, list[PackedRow]] = {}
    parts: list[list[PackedRow]] = []
    for row in rows:
        if row.num_new > TOGETHER_WIDTH:
            parts.append([row])
        else:
            by_width.setdefault(row.num_new, []).append(row)
    for same in by_width.values():
        same.sort(key=lambda row: row.kv_len)
        part: list[PackedRow] = []
        for row in same:
            if part and row.kv_len * (len(part) + 1) > most_keys:
                parts.append(part)
                part = []
            part.append(row)
        parts.append(part)
    return parts


def _group(rows: list[PackedRow], block_size: int, device: torch.device) -> _Group:
    kv_len = max(row.kv_len for row in rows)
    if len(rows) == 1:
        blocks = rows[0].blocks[: -(-kv_len // block_size)]
        if list(blocks) == list(range(blocks[0], blocks[0] + len(blocks))):
            return _Group(rows, blocks[0] * block_size, None, kv_len, None)
        return _Group(rows, None, _token_indices(rows[0], block_size, device), kv_len, None)
    gather = np.full((len(rows), kv_len), TRASH_BLOCK * block_size, dtype=np.int64)
    within = np.arange(block_size)
    for i, row in enumerate(rows):
        indices = np.asarray(row.blocks, dtype=np.int64)[:, None] * block_size + within
        gather[i, : row.kv_len] = indices.reshape(-1)[: row.kv_len]
    starts, width = [row.start for row in rows], rows[0].num_new
    packed = None
    if starts != list(range(starts[0], starts[0] + len(rows) * width, width)):
        indices = np.array(starts, dtype=np.int64)[:, None] + np.arange(width)
        packed = to_device(indices.reshape(-1), device)
    return _Group(rows, None, to_device(gather.reshape(-1), device), kv_len, packed)


def _token_indices(row: PackedRow, block_size: int, device: torch.device) -> Tensor:
    """Return the storage indices of a row's tokens, [kv_len] int64."""
    indices = np.asarray(row.blocks, dtype=np.int64)[:, None] * block_size + np.arange(block_size)
    return to_device(indices.reshape(-1)[: row.kv_len], device)


def _attend_group(query: Tensor, keys: Tensor, values: Tensor, group: _Group, options: AttentionOptions) -> Tensor:
    """Attend with query [B * q, Hq, D] over storage [tokens, Hkv, D]; return [B * q, Hq, Dv]."""
    num_rows, width, num_kv_heads = len(group.rows), group.width, keys.shape[1]
    num_shared = query.shape[1] // num_kv_heads  # G query heads read one KV head
    first = _first_key_seen(group, options)
    k, v = (_read(storage, group, first) for storage in (keys, values))  # [B, Hkv, L, D]
    q = query.view(num_rows, width, num_kv_heads, num_shared, -1).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, q, D]
    num_parts = _num_parts(group, num_shared, query.device)
    mask = _mask(group, first, num_shared // num_parts, options, query.dtype, query.device)
    outputs = [
        _attend_heads(
            part.reshape(num_rows, num_kv_heads, -1, q.shape[-1]), k, v, mask, _of_part(options, n, num_parts)
        )
        for n, part in enumerate(q.chunk(num_parts, dim=2))
    ]
    out = outputs[0] if num_parts == 1 else torch.cat(outputs, dim=2)  # [B, Hkv, G * q, Dv]
    out = out.view(num_rows, num_kv_heads, num_shared, width, -1).permute(0, 3, 1, 2, 4)  # [B, q, Hkv, G, Dv]
    return out.reshape(num_rows * width, query.shape[1], -1)


def _num_parts(group: _Group, num_shared: int, device: torch.device) -> int:
    """Return in how many calls the query heads of a KV head attend. On a GPU those of a piece of a prompt do so one by
    one, with one mask for all: a mask for each would take as many times its memory. On a CPU one call is faster.
    """
    return num_shared if group.is_piece and device.type != "cpu" else 1


def _of_part(options: AttentionOptions, n: int, num_parts: int) -> AttentionOptions:
    """Return the options of the n-th of the query heads that share a KV head, where they attend one by one."""
    if options.sinks is None or num_parts == 1:
        return options
    return replace(options, sinks=options.sinks[n::num_parts])


def _attend_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attend with q [B, Hkv, G * q, D] over k and v [B, Hkv, L, D]; return [B, Hkv, G * q, Dv]."""
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scaling)
    return _explicit(q, k, v, mask, options)


def _first_key_seen(group: _Group, options: AttentionOptions) -> int:
    """Return the index of the first key that a query of a single row may see: earlier ones are outside every window."""
    if len(group.rows) > 1:
        return 0
    parents = group.rows[0].parents
    position = group.kv_len - (group.width if parents is None else len(parents))  # no query has an earlier one
    if options.chunk is not None:
        return position // options.chunk * options.chunk
    return 0 if options.window is None else max(0, position + 1 - options.window)


def _read(storage: Tensor, group: _Group, first: int) -> Tensor:
    """Return [B, Hkv, L - first, D] of storage [tokens, Hkv, D]."""
    if group.first_key is not None:
        part = storage[group.first_key + first : group.first_key + group.kv_len]
    else:
        assert group.gather is not None
        part = storage.index_select(0, group.gather[first:])
    return part.view(len(group.rows), -1, *part.shape[1:]).transpose(1, 2)


def _mask(
    group: _Group, first: int, num_shared: int, options: AttentionOptions, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return [B, 1, G * q, L - first], 0 or -inf to be added to the scores; None when everything is seen."""
    sees_all = group.width == 1 or (not options.causal and options.window is None)
    if len(group.rows) == 1 and sees_all and group.rows[0].parents is None:
        return None
    key = (options.window, options.chunk, options.causal, num_shared, dtype)
    if key not in group.masks:
        if group.is_piece:
            mask = _piece_mask(group, first, options, dtype, device)  # [1, q, L - first]
        else:
            sees = _seen(group, first, options)  # [B, q, L - first]
            mask = to_device(np.where(sees, np.float32(0), np.float32(-np.inf)), device).to(dtype)
        mask = mask[:, None, None].expand(-1, 1, num_shared, -1, -1)  # [B, 1, G, q, L - first]
        group.masks[key] = mask.reshape(len(group.rows), 1, -1, mask.shape[-1])
    return group.masks[key]


def _piece_mask(
    group: _Group, first: int, options: AttentionOptions, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask of a piece of a prompt, [1, q, L - first], made on the device: it has as many numbers as many a
    model's weights.
    """
    keys = torch.arange(first, group.kv_len, dtype=torch.int32, device=device)  # [L - first]
    queries = torch.arange(group.kv_len - group.width, group.kv_len, dtype=torch.int32, device=device)[:, None]
    num_columns = -(-len(keys) // COLUMNS_ALIGNED) * COLUMNS_ALIGNED
    mask = torch.zeros(group.width, num_columns, dtype=dtype, device=device)[:, : len(keys)]
    if options.causal:
        mask.masked_fill_(keys > queries, -torch.inf)
    if options.window is not None:
        mask.masked_fill_(keys <= queries - options.window, -torch.inf)
        if not options.causal:
            mask.masked_fill_(keys >= queries + options.window, -torch.inf)
    if options.chunk is not None:
        mask.masked_fill_(keys // options.chunk != queries // options.chunk, -torch.inf)
    return mask[None]


def _seen(group: _Group, first: int, options: AttentionOptions) -> np.ndarray:
    """Return which keys each query sees, [B, q, L - first] bool."""
    if any(row.parents is not None for row in group.rows):
        assert options.causal, "a tree's nodes see no later ones"
        return _seen_in_trees(group, options)[:, :, first:]
    kv_lens = np.array([row.kv_len for row in group.rows])
    queries = (kv_lens[:, None] - group.width + np.arange(group.width))[:, :, None]  # [B, q, 1] positions
    keys = np.arange(first, group.kv_len)[None, None, :]
    last = queries if options.causal else np.broadcast_to(kv_lens[:, None, None] - 1, queries.shape)
    sees = keys <= last
    if options.window is not None:
        sees &= keys > queries - options.window
        if not options.causal:
            sees &= keys < queries + options.window
    if options.chunk is not None:
        sees &= keys // options.chunk == queries // options.chunk
    return sees


def _seen_in_trees(group: _Group, options: AttentionOptions) -> np.ndarray:
    """Return which keys each query sees, [B, q, L] bool, for trees and the chains beside them."""
    sees = np.zeros((len(group.rows), group.width, group.kv_len), dtype=bool)
    for i, row in enumerate(group.rows):
        sees[i, :, : row.kv_len] = seen(row.kv_len, row.parents, group.width, options.window, options.chunk)
    return sees


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attend with soft caps and sinks, which scaled_dot_product_attention does not have."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * options.scaling  # [B, Hkv, G * q, L]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)
    num_shared = options.sinks.shape[0] // k.shape[1]
    sinks = options.sinks.view(1, k.shape[1], num_shared, 1)
    sinks = sinks.expand(q.shape[0], -1, -1, q.shape[2] // num_shared).reshape(*q.shape[:3], 1)
    probs = torch.softmax(torch.cat([scores, sinks.to(scores.dtype)], dim=-1), dim=-1, dtype=torch.float32)
    return torch.matmul(probs[..., :-1].to(v.dtype), v)
