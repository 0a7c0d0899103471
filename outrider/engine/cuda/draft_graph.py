"""Draft loops as CUDA graphs: which are captured, which one serves a set of proposals, one copy back at the end.

Made by `GraphedPath`, called by the proposer through the `DraftLoop` protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.cuda.draft_loop import (
    FIRST_WIDTH,
    MODES,
    NUM_KEPT,
    Drafted,
    Draw,
    Loop,
    LoopKind,
    load_inputs,
    loop_inputs,
)
from outrider.engine.cuda.graphs import Graph, GraphMaker
from outrider.engine.cuda.host_copy import to_host
from outrider.engine.cuda.static_plan import Inputs, StaticPlan
from outrider.engine.cuda.step_graphs import FREE_TOKENS, LARGEST_DIFFERENCE, batch_sizes
from outrider.engine.model_files import first_line
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.step_plan import Row
from outrider.wire.log import get_logger

log = get_logger(__name__)

LENGTHS = (5, 3, 8)
"""K that loops are captured for, the most wanted first; a shorter proposal leaves the rest of a loop unused."""


@dataclass(slots=True)
class _Captured:
    first: StaticPlan
    inputs: Inputs
    compute: Callable[[], None]
    graph: Graph
    proven: bool = False


class DraftGraphs:
    """Implements `DraftLoop` over graphs of `run`: plan -> logits [N, V] float32."""

    def __init__(
        self,
        run: Callable[[PagedPlan], Tensor],
        maker: GraphMaker,
        device: torch.device,
        dtype: torch.dtype,
        vocab_size: int,
        block_size: int,
        copy_blocks: Callable[[Sequence[tuple[int, int]]], None],
        context_limit: int,
    ) -> None:
        self._run, self._maker, self._device = run, maker, device
        self._vocab_size, self._block_size = vocab_size, block_size
        self._copy_blocks, self._context_limit = copy_blocks, context_limit
        self._largest_difference = LARGEST_DIFFERENCE[dtype]
        self._captured: dict[LoopKind, _Captured] = {}

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def capture(self, max_rows: int, table_width: int, budget_s: float, lengths: Sequence[int]) -> None:
        """Capture what fits in budget_s seconds; what does not goes token by token. Nothing here is fatal."""
        started, sizes = time.monotonic(), batch_sizes(max_rows)
        for kind in _kinds(lengths, sizes, self._vocab_size):
            if time.monotonic() - started > budget_s:
                log.info("CUDA graphs: %.0f s are over, other drafts go token by token", budget_s)
                break
            try:
                if not self._captured:
                    self._make_outputs(sizes[0], max(lengths))
                self._captured[kind] = self._capture(kind, table_width)
            except Exception as error:  # a class that waits for the device, or memory
                why = f"{type(error).__name__}: {first_line(error)}"
                log.warning("CUDA graphs: %s cannot be captured, they go token by token: %s", kind, why)
                break
        log.info("CUDA graphs: %d draft loops captured in %.1f s", len(self._captured), time.monotonic() - started)

    def _make_outputs(self, max_rows: int, longest: int) -> None:
        """Where all loops leave their results; they are copied from there before the next one runs."""
        self._ids = torch.zeros(max_rows, longest, dtype=torch.int64, device=self._device)  # [B, K], -1: not finite
        self._best = torch.zeros(max_rows, longest, device=self._device)  # [B, K] float32, each step's largest logit
        self._laws = torch.zeros(max_rows, longest, self._vocab_size, device=self._device)  # [B, K, V] float32

    def _capture(self, kind: LoopKind, table_width: int) -> _Captured:
        first = StaticPlan(kind.num_rows, FIRST_WIDTH, table_width, self._block_size, self._vocab_size, self._device)
        inputs = loop_inputs(kind, self._device)
        loop = Loop(self._run, kind, first, inputs, self._ids, self._best, self._laws)
        load_inputs(inputs, [], [])
        return _Captured(first, inputs, loop.compute, self._maker.capture(loop.compute))

    def run(
        self, rows: Sequence[Row], num_draft_tokens: int, draws: Sequence[Draw], topk: int | None
    ) -> Drafted | None:
        kind = self._kind(rows, num_draft_tokens, draws, topk)
        if kind is None:
            return None
        captured = self._captured[kind]
        self._reserve(rows, kind.length)
        try:
            captured.first.load(rows)
            load_inputs(captured.inputs, rows, draws)
            captured.graph.replay()
            if not captured.proven:
                self._prove(kind, len(rows))
            used = (slice(len(rows)), slice(num_draft_tokens))
            laws = to_host(self._laws[used].clone()) if kind.samples else None  # the next run writes over its source
            token_ids = self._ids[used].tolist()  # the one wait
        except BaseException:
            for row in rows:
                row.table.truncate(row.num_cached)
            raise
        for row in rows:
            row.table.truncate(row.num_tokens + num_draft_tokens - 1)
        return Drafted([None if min(ids) < 0 else ids for ids in token_ids], laws)

    def _kind(self, rows: Sequence[Row], length: int, draws: Sequence[Draw], topk: int | None) -> LoopKind | None:
        """The smallest captured loop that serves them."""
        samples = any(draw.temperature > 0 for draw in draws)
        cuts = samples and topk is not None and topk < self._vocab_size
        if (
            not rows
            or (cuts and topk != NUM_KEPT)
            or any(not row.num_new <= FIRST_WIDTH <= row.num_tokens for row in rows)
        ):
            return None
        room = self._context_limit - max(row.num_tokens for row in rows) + 1
        fitting = [
            kind
            for kind in self._captured
            if (kind.samples, kind.cuts) == (samples, cuts)
            and kind.num_rows >= len(rows)
            and length <= kind.length <= room
        ]
        best = min(fitting, key=lambda kind: (kind.length, kind.num_rows), default=None)
        return best if best is None or best.num_rows <= max(FREE_TOKENS, 2 * len(rows)) else None

    def _reserve(self, rows: Sequence[Row], length: int) -> None:
        """Blocks for the new tokens and all drafts but the last. Raises OutOfBlocks; the tables are then as before."""
        copies: list[tuple[int, int]] = []
        try:
            for row in rows:
                copies.extend(row.table.reserve(row.num_tokens + length - 1))
        except BaseException:
            for row in rows:
                row.table.truncate(row.num_cached)
            raise
        finally:  # a block that was exchanged for one of its own needs the old one's tokens either way
            if copies:
                self._copy_blocks(copies)

    def _prove(self, kind: LoopKind, num_rows: int) -> None:
        """The loop's first rows, once more without the graph; what that computes stands, KV included."""
        captured, used = self._captured[kind], (slice(num_rows), slice(kind.length))
        ids, best = self._ids[used].clone(), self._best[used].clone()
        captured.compute()
        difference = _difference(ids, best, self._ids[used], self._best[used])
        if difference is None:
            return  # the model's own fault: nothing to compare with
        if difference <= self._largest_difference:
            captured.proven = True
        else:
            log.warning("CUDA graphs: %s differ from eager ones by %.1e, the graph is dropped", kind, difference)
            del self._captured[kind]


def _kinds(lengths: Sequence[int], sizes: Sequence[int], vocab_size: int) -> Iterable[LoopKind]:
    for length in lengths:
        for samples, cuts in MODES:
            if not cuts or vocab_size > NUM_KEPT:
                yield from (LoopKind(size, length, samples, cuts) for size in sizes)


def _difference(ids: Tensor, best: Tensor, true_ids: Tensor, true_best: Tensor) -> float | None:
    """Of the largest logits, as a share of the largest of all, while the tokens before were the same.

    A token may differ at a near-tie, and everything after it then may. None when the truth is not finite.
    """
    if bool((true_ids < 0).any()):
        return None
    same = (ids == true_ids).long().cumprod(dim=1)
    before = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], dim=1).bool()  # [B, K]
    return float(((best - true_best).abs() * before).max() / true_best.abs().max())
