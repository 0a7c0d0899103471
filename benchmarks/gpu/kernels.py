"""Section `kernels`: each attention backend over blocks, beside float64, for every kind of row in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from outrider.engine.attention.paged_attention import TorchAttention
from outrider.engine.attention.paged_plan import AttentionOptions, PagedAttention, PagedPlan
from outrider.engine.attention.varlen_attention import BLOCK_SIZE, VarlenAttention, torch_refusal
from outrider.engine.kv_pool import KVPool
from outrider.engine.step_plan import Row
from outrider.engine.token_tree import visible_tokens

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Error ||out - exact|| / ||exact|| by dtype: several times the rounding of inputs and output."""
KV_HEADS, GROUP = 4, 4
"""Key and value heads, and query heads of each."""
CONTEXT_LIMIT = 4096
PARENTS = (-1, 0, 0, 2, 1, 3, 2, 0)
"""A tree of 8 with siblings at every depth."""


@dataclass(frozen=True)
class Case:
    """Rows of one call: (tokens cached, new tokens) each; the last one may end with a tree."""

    name: str
    rows: tuple[tuple[int, int], ...]
    with_tree: bool = False
    window: int | None = None


CASES = (
    Case("decodes", ((700, 1), (3, 1), (255, 1), (256, 1))),
    Case("verifies", ((700, 5), (1, 5), (511, 5))),
    Case("pieces of prompts", ((0, 300), (600, 130))),
    Case("all at once", ((0, 90), (700, 5), (31, 1), (513, 1))),
    Case("with a tree of 8", ((700, 5), (40, 1), (530, 8)), with_tree=True),
    Case("a window of 100", ((700, 5), (0, 300), (40, 1)), window=100),
)


def run(bench: Bench) -> None:
    dtypes = bench.size((torch.bfloat16, torch.float16, torch.float32), (torch.float32, torch.bfloat16))
    worst: dict[str, float] = {}
    for name, backend, block_size in _backends(bench):
        for dtype in dtypes:
            for head_dim in bench.size((64, 128, 256), (64,)):
                for case in CASES:
                    if case.with_tree and name == "varlen":
                        continue  # its path is never given trees
                    error, why = _error(bench, backend, block_size, dtype, head_dim, case)
                    short = str(dtype).removeprefix("torch.")
                    bench.tell(
                        "kernel", backend=name, dtype=short, head_dim=head_dim, rows=case.name, error=error, why=why
                    )
                    if why is not None:
                        if name == "torch" or dtype is not torch.float32:  # flash attention has no float32
                            bench.find(f"{name}, {short}, heads of {head_dim}, {case.name}: {why}")
                        continue
                    worst[short] = max(worst.get(short, 0.0), error)
                    if not error <= ALLOWED[dtype]:
                        bench.find(f"{name}, {short}, heads of {head_dim}, {case.name}: error {error:.1e}")
    bench.sum_up("worst error " + ", ".join(f"{error:.1e} in {name}" for name, error in worst.items()))


def _backends(bench: Bench) -> list[tuple[str, PagedAttention, int]]:
    found: list[tuple[str, PagedAttention, int]] = [("torch", TorchAttention(), 16)]
    if bench.on_card:
        refusal = torch_refusal(torch.__version__)
        if refusal is None:
            found.append(("varlen", VarlenAttention(), BLOCK_SIZE))
        else:
            bench.tell("backend", name="varlen", outcome=f"not run: {refusal}")
    return found


@torch.inference_mode()
def _error(
    bench: Bench, backend: PagedAttention, block_size: int, dtype: torch.dtype, head_dim: int, case: Case
) -> tuple[float, str | None]:
    """Return the error of one call, or why the backend does not run it."""
    device = torch.device(bench.device)
    pool = KVPool(4 * CONTEXT_LIMIT // block_size, block_size)
    torch.manual_seed(len(case.name) + head_dim)
    rows = _rows(pool, case)
    shape = (pool.num_blocks + 1, block_size, KV_HEADS, head_dim)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    num_tokens = sum(row.num_new for row in rows)
    query = torch.randn(num_tokens, KV_HEADS * GROUP, head_dim, device=device).to(dtype)
    options = AttentionOptions(scaling=head_dim**-0.5, window=case.window)
    try:
        plan = PagedPlan.build(rows, device, 1000)
        backend.begin(plan)
        found = backend.attend(query, keys, values, plan, options).double()
    except Exception as error:  # whatever a backend or its kernel raises is what the section is there to tell
        return 0.0, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    exact = _exact(rows, query, keys, values, options)
    return float((found - exact).norm() / exact.norm()), None


def _rows(pool: KVPool, case: Case) -> list[Row]:
    rows = []
    for index, (num_cached, num_new) in enumerate(case.rows):
        gap = pool.new_table()
        gap.reserve(pool.block_size * (index + 1))  # so that no table's blocks begin where the pool's do
        table = pool.new_table()
        table.reserve(num_cached + num_new)
        parents = PARENTS if case.with_tree and index == len(case.rows) - 1 else None
        rows.append(Row(table, [1] * num_new, num_cached, num_new, [1] * num_cached, parents))
    return rows


def _exact(rows: list[Row], query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Return the attention [T, Hq, D] in float64, written straight down."""
    parts, start = [], 0
    for row in rows:
        at = torch.tensor(row.table.storage_indices(range(row.num_tokens)), device=query.device)
        k, v = (each.flatten(0, 1)[at].double().repeat_interleave(GROUP, dim=1) for each in (keys, values))
        q = query[start : start + row.num_new].double()
        sees = torch.from_numpy(visible_tokens(row.num_tokens, row.parents, row.num_new, options.window, None)).to(
            query.device
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * options.scaling
        probs = scores.masked_fill(~sees[None], float("-inf")).softmax(dim=-1)
        parts.append(torch.einsum("hqk,khd->qhd", probs, v))
        start += row.num_new
    return torch.cat(parts)
