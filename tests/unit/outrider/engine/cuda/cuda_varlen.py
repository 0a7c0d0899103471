"""torch's varlen_attn with pages, in plain maths on CPU: what its documentation and its kernel's checks say.

It refuses what the kernel refuses (types, shapes, page size, split keys over pages) and reads what the kernel reads:
`rows`' keys by the block table, as many as seqused_k says, whatever else the pages hold.
"""

import torch
from torch import Tensor

PAGE_MULTIPLE = 256


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """query [T, Hq, D], key and value [pages, page_size, Hkv, D] -> [T, Hq, D]."""
    assert seqused_k is not None and block_table is not None
    _check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa, seqused_k, block_table)
    assert num_splits == 1, "split keys are wrong with pages"
    output = torch.full_like(query, torch.nan)
    bounds, lengths = cu_seq_q.tolist(), seqused_k.tolist()
    for b, length in enumerate(lengths):
        own = query[bounds[b] : bounds[b + 1]]  # [q, Hq, D]
        pages = block_table[b, : -(-length // key.shape[1])].long()
        keys, values = (pool[pages].flatten(0, 1)[:length] for pool in (key, value))  # [L, Hkv, D]
        scaling = query.shape[2] ** -0.5 if scale is None else scale
        output[bounds[b] : bounds[b + 1]] = _attention(own, keys, values, scaling, window_size)
    return output


def _attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: tuple[int, int]) -> Tensor:
    """query [q, H, D], keys and values [L, Hkv, D]; the last query stands at the last key."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [L, H, D]
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * scale  # [H, q, L]
    at = torch.arange(len(query))[:, None] + len(keys) - len(query)  # [q, 1], each query's own key
    offset = torch.arange(len(keys)) - at  # [q, L]
    left, right = window
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> None:
    batch = cu_seq_q.numel() - 1
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert query.dim() == 3 and key.dim() == 4 and key.shape == value.shape and key.shape[3] == query.shape[2]
    assert query.dtype == key.dtype == value.dtype
    assert key.shape[1] % PAGE_MULTIPLE == 0, f"pages of {key.shape[1]} tokens"
    assert all(t.stride(-1) == 1 for t in (query, key, value, block_table))
    assert cu_seq_q.is_contiguous() and cu_seq_k.is_contiguous() and seqused_k.is_contiguous()
    assert cu_seq_k.shape == (batch + 1,) and seqused_k.shape == (batch,) and block_table.shape[0] == batch
    assert query.shape[2] % 8 == 0 and query.shape[2] <= 256
    assert query.shape[1] % key.shape[2] == 0 and (enable_gqa or query.shape[1] == key.shape[2])
    counts = cu_seq_q.diff()
    assert int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == len(query) and int(counts.min()) > 0
    # They bound loops and buffers of the kernel: smaller is an error that it does not report.
    assert int(counts.max()) <= max_q and int(seqused_k.max()) <= max_k <= block_table.shape[1] * key.shape[1]
    assert bool((counts <= seqused_k).all())
