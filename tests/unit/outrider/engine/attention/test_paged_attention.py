"""Attention over blocks, against its definition."""

import pytest
import torch
from torch import Tensor

from outrider.engine.attention import paged_attention
from outrider.engine.attention.paged_attention import TorchAttention
from outrider.engine.attention.paged_plan import AttentionOptions, PagedPlan
from outrider.engine.kv_pool import TRASH_BLOCK, KVPool
from outrider.engine.step_plan import Row
from tests.unit.outrider.engine.attention.tables import CPU

META = torch.device("meta")


def reference(query: Tensor, keys: Tensor, values: Tensor, position: int, options: AttentionOptions) -> Tensor:
    """One query [Hq, D] at a position over keys [L, Hkv, D] and values [L, Hkv, Dv], in float64: the definition."""
    seen = list(range(position + 1 if options.causal else len(keys)))
    if options.window is not None:
        seen = [i for i in seen if abs(i - position) < options.window]
    if options.chunk is not None:
        seen = [i for i in seen if i // options.chunk == position // options.chunk]
    shared = query.shape[0] // keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        k, v = keys[seen, head // shared].double(), values[seen, head // shared].double()
        scores = k @ query[head].double() * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks[head : head + 1].double()])
        out.append(torch.softmax(scores, 0)[: len(seen)] @ v)
    return torch.stack(out)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = [
    AttentionOptions(0.3),
    AttentionOptions(0.3, window=5),
    AttentionOptions(0.3, chunk=8),
    AttentionOptions(0.3, softcap=1.5),
    AttentionOptions(0.3, sinks=SINKS),
    AttentionOptions(0.3, window=3, softcap=1.5, sinks=SINKS),
    AttentionOptions(0.3, causal=False),
    AttentionOptions(0.3, window=3, causal=False),
]


@pytest.mark.parametrize("how", ["alone", "together", "as on a GPU"])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: f"window {o.window} chunk {o.chunk} cap {o.softcap} causal {o.causal}"
)
def test_attention_over_blocks_equals_its_definition(
    options: AttentionOptions, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN wherever no row's tokens lie: an unread key must stay unread, not masked."""
    monkeypatch.setattr(paged_attention, "TOGETHER_BYTES", 0 if how == "alone" else 1 << 20)
    if how == "as on a GPU":
        num_parts = paged_attention._num_parts
        monkeypatch.setattr(paged_attention, "_num_parts", lambda group, num, _: num_parts(group, num, META))
    generator = torch.Generator().manual_seed(0)
    pool = KVPool(50, 4)
    shapes = [(21, 1), (9, 6), (1, 1), (30, 6), (17, 17), (13, 1), (6, 6), (33, 2), (39, 18)]
    made = grown_rows(pool, shapes)
    plan = PagedPlan.build(made, CPU, 10, needs_gather=True)
    keys, values = torch.full((51, 4, 2, 6), torch.nan), torch.full((51, 4, 2, 10), torch.nan)
    keys[TRASH_BLOCK], values[TRASH_BLOCK] = 0.0, 0.0
    assert plan.gather is not None
    lines = [torch.randn(len(plan.gather), 2, width, generator=generator) for width in (6, 10)]  # [S, Hkv, D]
    keys.flatten(0, 1)[plan.gather], values.flatten(0, 1)[plan.gather] = lines
    query = torch.randn(plan.num_tokens, 4, 6, generator=generator)  # [T, Hq, D]
    truth = expected(query, lines[0], lines[1], plan, options)
    attention = TorchAttention()
    attention.begin(plan)
    assert (attention.attend(query, keys, values, plan, options) - truth).abs().max() < 1e-5
    assert (attention.attend_gathered(query, lines[0], lines[1], plan, options) - truth).abs().max() < 1e-5


def grown_rows(pool: KVPool, shapes: list[tuple[int, int]]) -> list[Row]:
    """(tokens, new ones) of each; tables grow in turns, so that their blocks are scattered."""
    tables = [pool.new_table() for _ in shapes]
    for end in range(3, 40, 3):
        for table, (length, _) in zip(tables, shapes, strict=True):
            table.reserve(min(end, length))
    return [Row.of(t, [1] * length, length - new, 1) for t, (length, new) in zip(tables, shapes, strict=True)]


def expected(query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
    out, start = [], 0
    for row in plan.rows:
        mine = slice(start, start + row.kv_len)
        for i in range(row.num_new):
            position = row.kv_len - row.num_new + i
            out.append(reference(query[row.start + i], keys[mine], values[mine], position, options))
        start += row.kv_len
    return torch.stack(out).float()
