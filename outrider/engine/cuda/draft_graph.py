"""Draft loops as CUDA graphs: which are captured, which one serves a set of proposals, one copy back at the end.

Made by `GraphedPath`, called by the proposer through the `DraftLoop` protocol.

The draft's K steps as one computation: every token is chosen on the device and fed back there.

For proposals whose laws are the model's own, at a temperature and cut to the best few at most; penalties, nucleus and
the like go token by token. Captured and replayed by `draft_graph`, which offers it to the proposer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import to_host
from outrider.engine.cuda.step_graphs import (
    FREE_TOKENS,
    LARGEST_DIFFERENCE,
    Graph,
    GraphMaker,
    Inputs,
    StaticPlan,
    batch_sizes,
)
from outrider.engine.loading.model_files import first_line
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.sampling.host_sampling import COLDEST
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.sampling import Laws, cut
from outrider.engine.step_plan import Row
from outrider.wire.log import get_logger

FIRST_WIDTH = 2
"""Tokens a row in a loop's first step: the last one, and the last draft before it when all drafts were kept."""
NUM_KEPT = 128
"""Best tokens that a cut law keeps, the gateway's own default. Other cuts go token by token."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How many tokens one row is asked for, and how they are chosen."""

    num_tokens: int
    temperature: float
    """0: the best token."""
    uniforms: Sequence[float]
    """One for every token, in (0, 1); empty for the best."""


@dataclass(frozen=True, slots=True)
class Drafted:
    token_ids: list[list[int] | None]
    """[B], as many of each row as it was asked for; None for a row whose logits were not finite."""
    laws: list[list[RowLaw]] | None
    """[B], a law for each token; None when all are greedy."""


class DraftLoop(Protocol):
    def run(self, rows: Sequence[Row], draws: Sequence[Draw], topk: int | None) -> Drafted | None:
        """Feed the rows, then draft: the KV of all new tokens and of all drafts but the last is in the cache after it.

        rows: unreserved, one logit each. topk: cut each law to this many best tokens before drawing.
        None, with nothing done, when these rows have to go token by token. Raises OutOfBlocks, with nothing done.
        """


MODES = {(False, False): "greedy", (True, False): "whole laws", (True, True): "cut laws"}
"""What loops are captured for, the most wanted first: (samples, cuts)."""


@dataclass(frozen=True, slots=True)
class LoopKind:
    """What a loop is captured for."""

    num_rows: int
    length: int
    samples: bool
    cuts: bool

    def __str__(self) -> str:
        return f"{self.length} drafts of {self.num_rows} rows, {MODES[self.samples, self.cuts]}"


def loop_inputs(kind: LoopKind, device: torch.device) -> Inputs:
    """What a loop reads besides its first step's plan."""
    return Inputs(
        {
            "uniforms": ((kind.num_rows, kind.length), np.float64),
            "num_tokens": ((kind.num_rows,), np.int64),
            "temperatures": ((kind.num_rows,), np.float32),
        },
        device,
    )


def load_inputs(inputs: Inputs, rows: Sequence[Row], draws: Sequence[Draw]) -> None:
    flat, values = inputs.new_values()
    values["uniforms"][:] = 0.5
    values["num_tokens"][:] = FIRST_WIDTH  # of the made-up rows
    values["temperatures"][:] = 1.0
    for i, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        values["num_tokens"][i] = row.num_tokens
        values["temperatures"][i] = max(draw.temperature, COLDEST) if draw.temperature else 0.0  # float32 may lose it
        values["uniforms"][i, : len(draw.uniforms)] = draw.uniforms
    inputs.load(flat)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where all loops leave their results; they are copied from there before the next one runs."""

    ids: Tensor
    """[B, K] int64; -1: not finite."""
    best: Tensor
    """[B, K] float32: each step's largest logit."""
    laws: Laws
    """[B, K, V] and [B, K, 0]."""
    cut_laws: Laws
    """[B, K, NUM_KEPT] twice."""

    @classmethod
    def new(cls, max_rows: int, longest: int, vocab_size: int, device: torch.device) -> Outputs:
        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_rows, longest, width, dtype=dtype, device=device)

        laws = Laws(zeros(vocab_size, torch.float32), zeros(0, torch.int32))
        cut_laws = Laws(zeros(NUM_KEPT, torch.float32), zeros(NUM_KEPT, torch.int32))
        return cls(zeros(1, torch.int64)[..., 0], zeros(1, torch.float32)[..., 0], laws, cut_laws)

    def of(self, kind: LoopKind, num_rows: int | None = None, length: int | None = None) -> Outputs:
        """Return the part of a loop, or of some of its rows and steps, with the laws that it draws from."""
        used = slice(num_rows or kind.num_rows), slice(length or kind.length)
        laws = Laws(*(part[used] for part in (self.cut_laws if kind.cuts else self.laws)))
        return Outputs(self.ids[used], self.best[used], laws, laws)


class Loop:
    """The computation that is captured. Everything it needs lies in buffers that stay where they are."""

    def __init__(
        self,
        run: Callable[[PagedPlan], Tensor],
        kind: LoopKind,
        first: StaticPlan,
        inputs: Inputs,
        out: Outputs,
    ) -> None:
        self._run, self._kind = run, kind
        num_tokens = kind.num_rows * FIRST_WIDTH
        at = torch.arange(FIRST_WIDTH - 1, num_tokens, FIRST_WIDTH, device=out.ids.device)
        self._first = replace(first.plan, logits_at=at)
        self._uniforms, self._num_tokens = inputs["uniforms"], inputs["num_tokens"]  # [B, K] float64, [B] int64
        self._temperatures = inputs["temperatures"]  # [B] float32
        self._out = out.of(kind)
        self._rows = torch.arange(kind.num_rows + 1, dtype=torch.int32, device=out.ids.device)

    def compute(self) -> None:
        logits = self._run(self._first)  # [B, V]
        for j in range(self._kind.length):
            chosen = self._choose(logits, j)
            if j + 1 < self._kind.length:
                logits = self._run(self._following(chosen, j))

    def _choose(self, logits: Tensor, j: int) -> Tensor:
        """-> [B] int64, always ids of the vocabulary."""
        best, chosen = logits.max(dim=1)
        if self._kind.samples:
            laws = cut(draft_laws(logits, self._temperatures), NUM_KEPT if self._kind.cuts else None)
            self._out.laws.scores[:, j].copy_(laws.scores)
            self._out.laws.ids[:, j].copy_(laws.ids)
            drawn, _ = laws.draw(self._uniforms[:, j])
            chosen = torch.where(self._temperatures > 0, drawn, chosen)
        finite = logits.sum(dim=1).isfinite()
        self._out.ids[:, j].copy_(torch.where(finite, chosen, -1))
        self._out.best[:, j].copy_(best)
        return chosen

    def _following(self, ids: Tensor, j: int) -> PagedPlan:
        """The plan that feeds draft j of every row."""
        plan = self._first
        positions = self._num_tokens + j  # [B]
        blocks = plan.block_table.gather(1, (positions // plan.block_size)[:, None])[:, 0].long()
        kv_lens = (positions + 1).int()
        return PagedPlan(
            input_ids=ids[None],
            position_ids=positions[None],
            cu_seq_q=self._rows,
            kv_lens=kv_lens,
            cu_seq_kv=torch.cat([self._rows[:1], kv_lens.cumsum(0, dtype=torch.int32)]),
            block_table=plan.block_table,
            write_to=blocks * plan.block_size + positions % plan.block_size,
            logits_at=self._rows[:-1].long(),
            gather=None,
            max_q=1,
            max_kv=plan.max_kv,
            block_size=plan.block_size,
            rows=(),
        )


def draft_laws(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return logits [B, V] float32 at temperatures [B] float32 as log-probs [B, V] float32.

    As `sampling` computes them for requests without other parameters; a temperature of 0 counts as 1.
    """
    scale = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    return ((logits - logits.amax(dim=1, keepdim=True)) / scale).log_softmax(dim=1)


log = get_logger(__name__)

LENGTHS = (5, 3, 8)
"""K that loops are captured for, the most wanted first; a shorter proposal leaves the rest of a loop unused."""


@dataclass(slots=True)
class _Captured:
    first: StaticPlan
    inputs: Inputs
    compute: Callable[[], None]
    graph: Graph


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
                    self._out = Outputs.new(sizes[0], max(lengths), self._vocab_size, self._device)
                captured = self._capture(kind, table_width)
                if self._proven(kind, captured):
                    self._captured[kind] = captured
            except Exception as error:  # a class that waits for the device, or memory
                why = f"{type(error).__name__}: {first_line(error)}"
                log.warning("CUDA graphs: %s cannot be captured, they go token by token: %s", kind, why)
                break
        log.info("CUDA graphs: %d draft loops captured in %.1f s", len(self._captured), time.monotonic() - started)

    def _capture(self, kind: LoopKind, table_width: int) -> _Captured:
        first = StaticPlan(kind.num_rows, FIRST_WIDTH, table_width, self._block_size, self._vocab_size, self._device)
        inputs = loop_inputs(kind, self._device)
        loop = Loop(self._run, kind, first, inputs, self._out)
        load_inputs(inputs, [], [])
        return _Captured(first, inputs, loop.compute, self._maker.capture(loop.compute))

    def _proven(self, kind: LoopKind, captured: _Captured) -> bool:
        """Whether a replay does what the loop does without a graph, for made-up rows."""
        captured.first.load([], made_up_id=self._vocab_size // 2)
        captured.compute()
        true = self._out.of(kind)
        true_ids, true_best = true.ids.clone(), true.best.clone()
        captured.graph.replay()
        difference = _difference(true.ids, true.best, true_ids, true_best)
        if not difference <= self._largest_difference:
            log.warning("CUDA graphs: %s differ from eager ones by %.1e, the graph is dropped", kind, difference)
            return False
        return True

    def run(self, rows: Sequence[Row], draws: Sequence[Draw], topk: int | None) -> Drafted | None:
        kind = self._kind(rows, draws, topk)
        if kind is None:
            return None
        captured = self._captured[kind]
        self._reserve(rows, kind.length)
        try:
            captured.first.load(rows)
            load_inputs(captured.inputs, rows, draws)
            captured.graph.replay()
            out = self._out.of(kind, len(rows), max(draw.num_tokens for draw in draws))
            token_ids, *laws = to_host(out.ids, *(out.laws if kind.samples else ()))  # the one wait
        except BaseException:
            for row in rows:
                row.table.truncate(row.num_cached)
            raise
        for row, draw in zip(rows, draws, strict=True):
            row.table.truncate(row.num_tokens + draw.num_tokens - 1)
        asked = [ids[: draw.num_tokens] for ids, draw in zip(token_ids.tolist(), draws, strict=True)]
        found = [None if min(ids) < 0 else ids for ids in asked]
        if not kind.samples:
            return Drafted(found, None)
        own_laws = (Laws(*own).rows(self._vocab_size) for own in zip(*laws, strict=True))
        return Drafted(found, [own[: draw.num_tokens] for own, draw in zip(own_laws, draws, strict=True)])

    def _kind(self, rows: Sequence[Row], draws: Sequence[Draw], topk: int | None) -> LoopKind | None:
        """The smallest captured loop that serves them."""
        samples = any(draw.temperature > 0 for draw in draws)
        cuts = samples and topk is not None and topk < self._vocab_size
        if (
            not rows
            or (cuts and topk != NUM_KEPT)
            or any(not row.num_new <= FIRST_WIDTH <= row.num_tokens for row in rows)
        ):
            return None
        length = max(draw.num_tokens for draw in draws)
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


def _kinds(lengths: Sequence[int], sizes: Sequence[int], vocab_size: int) -> Iterable[LoopKind]:
    for length in lengths:
        for samples, cuts in MODES:
            if not cuts or vocab_size > NUM_KEPT:
                yield from (LoopKind(size, length, samples, cuts) for size in sizes)


def _difference(ids: Tensor, best: Tensor, true_ids: Tensor, true_best: Tensor) -> float:
    """Of the largest logits, as a share of the largest of all, while the tokens before were the same.

    A token may differ at a near-tie, and everything after it then may. NaN where one of the logits is not finite.
    """
    same = (ids == true_ids).long().cumprod(dim=1)
    before = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], dim=1).bool()  # [B, K]
    return float(((best - true_best).abs() * before).max() / true_best.abs().max())
