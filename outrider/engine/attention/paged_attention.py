"""Attention over blocks with torch alone: the backend of the `paged` path on a CPU, or on a GPU without flash
attention.

Long rows are read one by one, in place if their blocks are consecutive. Short rows of one width are read together,
padded, since a call's fixed cost would outweigh the copy. The query heads that share a KV head become query rows, so
that no key is repeated.

Shapes: B rows of q new tokens each, L keys, Hq query heads (G for each of Hkv KV heads), D columns of a key, Dv of a
value.
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
from outrider.engine.token_tree import visible_tokens

TOGETHER_BYTES = 1 << 20
"""Maximum size in bytes of the padded keys of sequences whose attention is computed in one call on a CPU. Above it,
nothing is gained, and allocating memory costs time (measured)."""
TOGETHER_BYTES_ON_DEVICE = 64 << 20
"""Maximum size in bytes of the padded keys of sequences whose attention is computed in one call on a GPU, where a call
costs more and the copy to padded keys less. Not measured."""
COLUMNS_ALIGNED = 16
"""Multiple to which a mask's number of columns is padded in memory. If it is no multiple of 8, torch copies the mask
for each layer."""
TOGETHER_WIDTH = 16
"""Maximum number of new tokens of a sequence whose attention is computed in one call with other sequences. A sequence
with more new tokens is in prefill and gets a call of its own."""


@dataclass(slots=True)
class _Group:
    """Rows of one width that are read together, or a single row."""

    rows: list[PackedRow]
    first_key: int | None
    """Storage index of the first key, if the group is a single sequence whose blocks are consecutive: its keys are then
    read in place. None otherwise."""
    gather: Tensor | None
    """Storage indices of B sequences' keys, each padded to L keys with the trash block, [B * L] int64; None if
    `first_key` is set."""
    kv_len: int
    """L, the number of keys of the longest sequence."""
    packed: Tensor | None
    """Indices of the group's new tokens, q for each of B sequences, among all new tokens of the forward, [B * q] int64;
    None if they are consecutive."""
    masks: dict[tuple[int | None, int | None, bool, int, torch.dtype], Tensor] = field(default_factory=dict)
    """Attention masks [B, 1, G * q, number of keys] by (window, chunk, causal, G, dtype), where q is `width` and G the
    number of query heads that share a KV head. Layers with the same limits share a mask."""

    @property
    def width(self) -> int:
        """q, the number of new tokens of each sequence."""
        return self.rows[0].num_new

    @property
    def is_piece(self) -> bool:
        """Whether the group is a piece of a prompt: one sequence with many new tokens that are not a tree."""
        return self.width > TOGETHER_WIDTH and self.rows[0].parents is None


class TorchAttention:
    """Attention by torch's scaled_dot_product_attention. Short sequences with equally many new tokens share calls.
    Implements the interface `PagedAttention`.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] | None = None

    def begin(self, plan: PagedPlan) -> None:
        self._groups = None  # made at the first layer, whose keys have the bytes of a token

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
        keys = keys.flatten(0, 1)  # [tokens, Hkv, D], a view
        values = values.flatten(0, 1)  # [tokens, Hkv, Dv], a view
        if self._groups is None:
            max_bytes = TOGETHER_BYTES
            if query.device.type != "cpu":
                max_bytes = TOGETHER_BYTES_ON_DEVICE
            parts = _partition(plan.rows, max_bytes // (keys[0].numel() * keys.element_size()))
            self._groups = [_group(rows, plan.block_size, query.device) for rows in parts]
        if len(self._groups) == 1 and self._groups[0].packed is None:
            return _attend_group(query, keys, values, self._groups[0], options)
        output = query.new_empty(*query.shape[:2], values.shape[-1])  # [T, Hq, Dv]
        for group in self._groups:
            if group.packed is None:
                last = group.rows[-1]
                part = slice(group.rows[0].start, last.start + last.num_new)
                output[part] = _attend_group(query[part], keys, values, group, options)
            else:
                picked = query.index_select(0, group.packed)  # [B * q, Hq, D]
                output.index_copy_(0, group.packed, _attend_group(picked, keys, values, group, options))
        return output

    def attend_gathered(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions
    ) -> Tensor:
        output = query.new_empty(*query.shape[:2], values.shape[-1])  # [T, Hq, Dv]
        first_key = 0
        for row in plan.rows:
            group = _Group([row], first_key, None, row.kv_len, None)
            part = slice(row.start, row.start + row.num_new)
            output[part] = _attend_group(query[part], keys, values, group, options)
            first_key += row.kv_len
        return output


def _partition(rows: tuple[PackedRow, ...], max_keys: int) -> list[list[PackedRow]]:
    """Return the rows in lists that are read together: of one width, and with padding at most max_keys keys.

    (width, keys) of rows (6, 20), (500, 500), (6, 30), (1, 9), with max_keys 64:
    [(500, 500)], [(6, 20), (6, 30)] of 60 padded keys, [(1, 9)]
    """
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
            if part and row.kv_len * (len(part) + 1) > max_keys:
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
    gather = np.full((len(rows), kv_len), TRASH_BLOCK * block_size, dtype=np.int64)  # [B, L]
    offsets = np.arange(block_size)
    starts: list[int] = []
    for i, row in enumerate(rows):
        indices = np.asarray(row.blocks, dtype=np.int64)[:, None] * block_size + offsets  # [num_blocks, block_size]
        gather[i, : row.kv_len] = indices.reshape(-1)[: row.kv_len]
        starts.append(row.start)
    width = rows[0].num_new
    packed = None
    if starts != list(range(starts[0], starts[0] + len(rows) * width, width)):
        indices = np.array(starts, dtype=np.int64)[:, None] + np.arange(width)  # [B, q]
        packed = to_device(indices.reshape(-1), device)
    return _Group(rows, None, to_device(gather.reshape(-1), device), kv_len, packed)


def _token_indices(row: PackedRow, block_size: int, device: torch.device) -> Tensor:
    # [kv_len] int64
    indices = np.asarray(row.blocks, dtype=np.int64)[:, None] * block_size + np.arange(block_size)
    return to_device(indices.reshape(-1)[: row.kv_len], device)


def _attend_group(query: Tensor, keys: Tensor, values: Tensor, group: _Group, options: AttentionOptions) -> Tensor:
    """Attend with query [B * q, Hq, D] over storage [tokens, Hkv, D]; return [B * q, Hq, Dv]."""
    num_rows = len(group.rows)
    num_kv_heads = keys.shape[1]
    num_shared = query.shape[1] // num_kv_heads  # G query heads read one KV head
    first = _first_key_seen(group, options)
    k = _read(keys, group, first)  # [B, Hkv, L, D]
    v = _read(values, group, first)  # [B, Hkv, L, Dv]
    q = query.view(num_rows, group.width, num_kv_heads, num_shared, -1).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, q, D]
    num_parts = _num_parts(group, num_shared, query.device)
    mask = _mask(group, first, num_shared // num_parts, options, query.dtype, query.device)
    outputs: list[Tensor] = []
    for n, part in enumerate(q.chunk(num_parts, dim=2)):
        part = part.reshape(num_rows, num_kv_heads, -1, q.shape[-1])  # [B, Hkv, G / num_parts * q, D]
        outputs.append(_attend_heads(part, k, v, mask, _part_options(options, n, num_parts)))
    out = outputs[0]
    if num_parts > 1:
        out = torch.cat(outputs, dim=2)  # [B, Hkv, G * q, Dv]
    out = out.view(num_rows, num_kv_heads, num_shared, group.width, -1).permute(0, 3, 1, 2, 4)  # [B, q, Hkv, G, Dv]
    return out.reshape(num_rows * group.width, query.shape[1], -1)


def _num_parts(group: _Group, num_shared: int, device: torch.device) -> int:
    # In how many calls the query heads of a KV head attend. On a GPU those of a part of a prompt do one by one, with
    # the same mask: one call would take a mask of G times its memory. On a CPU one call is faster.
    if group.is_piece and device.type != "cpu":
        return num_shared
    return 1


def _part_options(options: AttentionOptions, n: int, num_parts: int) -> AttentionOptions:
    # 4 query heads, 2 KV heads, so G 2: part 0 has the sinks of heads 0 and 2, part 1 those of heads 1 and 3.
    if options.sinks is None or num_parts == 1:
        return options
    return replace(options, sinks=options.sinks[n::num_parts])


def _attend_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attend with q [B, Hkv, G * q, D] over k and v [B, Hkv, L, D]; return [B, Hkv, G * q, Dv]."""
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scaling)
    return _explicit(q, k, v, mask, options)


def _first_key_seen(group: _Group, options: AttentionOptions) -> int:
    # Earlier keys of a single row are outside every window. 20 keys, 2 new, window 4: the first query has position 18
    # and sees 15 to 18, so the first key is 15.
    if len(group.rows) > 1:
        return 0
    parents = group.rows[0].parents
    num_queries = group.width
    if parents is not None:  # nodes that are cached count: new ones may have their positions
        num_queries = len(parents)
    position = group.kv_len - num_queries  # no query has an earlier one
    if options.chunk is not None:
        return position // options.chunk * options.chunk
    if options.window is not None:
        return max(0, position + 1 - options.window)
    return 0


def _read(storage: Tensor, group: _Group, first: int) -> Tensor:
    # storage [tokens, Hkv, D] -> [B, Hkv, L - first, D]
    if group.first_key is not None:
        part = storage[group.first_key + first : group.first_key + group.kv_len]
    else:
        assert group.gather is not None
        part = storage.index_select(0, group.gather[first:])
    return part.view(len(group.rows), -1, *part.shape[1:]).transpose(1, 2)


def _mask(
    group: _Group, first: int, num_shared: int, options: AttentionOptions, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the mask to be added to the scores, [B, 1, G * q, L - first] of 0 or -inf; None when all keys are seen."""
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
    # The mask of a part of a prompt, [1, q, L - first]. Made on the device: it may be as large as a model's weights.
    keys = torch.arange(first, group.kv_len, dtype=torch.int32, device=device)  # [L - first]
    queries = torch.arange(group.kv_len - group.width, group.kv_len, dtype=torch.int32, device=device)[
        :, None
    ]  # [q, 1]
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
    """Return which keys each query sees, [B, q, L - first] bool.

    One row of 5 keys, 2 of them new, causal, window 3, first 0: [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    """
    if any(row.parents is not None for row in group.rows):
        assert options.causal, "a tree's nodes see no later ones"
        return _seen_in_trees(group, options)[:, :, first:]
    kv_lens = np.array([row.kv_len for row in group.rows])  # [B]
    queries = (kv_lens[:, None] - group.width + np.arange(group.width))[:, :, None]  # [B, q, 1] positions
    keys = np.arange(first, group.kv_len)[None, None, :]  # [1, 1, L - first] positions
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
    # [B, q, L] bool, of rows that are trees or chains
    sees = np.zeros((len(group.rows), group.width, group.kv_len), dtype=bool)
    for i, row in enumerate(group.rows):
        sees[i, :, : row.kv_len] = visible_tokens(row.kv_len, row.parents, group.width, options.window, options.chunk)
    return sees


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    # Soft caps and sinks, which scaled_dot_product_attention does not have; shapes as in _attend_heads.
    scores = torch.matmul(q, k.transpose(-1, -2)) * options.scaling  # [B, Hkv, G * q, L]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)
    num_shared = options.sinks.shape[0] // k.shape[1]
    sinks = options.sinks.view(1, k.shape[1], num_shared, 1)
    sinks = sinks.expand(q.shape[0], -1, -1, q.shape[2] // num_shared).reshape(*q.shape[:3], 1)  # [B, Hkv, G * q, 1]
    # The sink takes part in the softmax as one more key, whose probability is dropped.
    probs = torch.softmax(torch.cat([scores, sinks.to(scores.dtype)], dim=-1), dim=-1, dtype=torch.float32)
    return torch.matmul(probs[..., :-1].to(v.dtype), v)
