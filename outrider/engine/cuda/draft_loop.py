"""The draft's K steps as one computation: every token is chosen on the device and fed back there.

For proposals whose laws are the model's own, at a temperature and cut to the best few at most; penalties, nucleus and
the like go token by token. Captured and replayed by `draft_graph`, which offers it to the proposer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import HostCopy
from outrider.engine.cuda.static_plan import Inputs, StaticPlan
from outrider.engine.host_sampling import COLDEST
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.sampling import inverse_cdf, truncate_topk
from outrider.engine.step_plan import Row

FIRST_WIDTH = 2
"""Tokens a row in a loop's first step: the last one, and the last draft before it when all drafts were kept."""
NUM_KEPT = 128
"""Best tokens that a cut law keeps, the gateway's own default. Other cuts go token by token."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's tokens are chosen."""

    temperature: float
    """0: the best token."""
    uniforms: Sequence[float]
    """One for every token, in (0, 1); empty for the best."""


@dataclass(frozen=True, slots=True)
class Drafted:
    token_ids: list[list[int] | None]
    """[B][K]; None for a row whose logits were not finite."""
    log_probs: HostCopy | None
    """[B, K, V] float32: the law of each token, on its way to the host; None when all are greedy."""


class DraftLoop(Protocol):
    def run(
        self, rows: Sequence[Row], num_draft_tokens: int, draws: Sequence[Draw], topk: int | None
    ) -> Drafted | None:
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
    for i, (row, wish) in enumerate(zip(rows, draws, strict=True)):
        values["num_tokens"][i] = row.num_tokens
        values["temperatures"][i] = max(wish.temperature, COLDEST) if wish.temperature else 0.0  # float32 may lose it
        values["uniforms"][i, : len(wish.uniforms)] = wish.uniforms
    inputs.load(flat)


class Loop:
    """The computation that is captured. Everything it needs lies in buffers that stay where they are."""

    def __init__(
        self,
        run: Callable[[PagedPlan], Tensor],
        kind: LoopKind,
        first: StaticPlan,
        inputs: Inputs,
        ids: Tensor,
        best: Tensor,
        laws: Tensor,
    ) -> None:
        """ids [B', K'] int64, best [B', K'] and laws [B', K', V] float32: where the results go, B' and K' or fewer."""
        self._run, self._kind = run, kind
        num_tokens = kind.num_rows * FIRST_WIDTH
        at = torch.arange(FIRST_WIDTH - 1, num_tokens, FIRST_WIDTH, device=ids.device)
        self._first = replace(first.plan, logits_at=at)
        self._uniforms, self._num_tokens = inputs["uniforms"], inputs["num_tokens"]  # [B, K] float64, [B] int64
        self._temperatures = inputs["temperatures"]  # [B] float32
        self._ids, self._best, self._laws = ids[: kind.num_rows], best[: kind.num_rows], laws[: kind.num_rows]
        self._rows = torch.arange(kind.num_rows + 1, dtype=torch.int32, device=ids.device)

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
            laws = draft_laws(logits, self._temperatures, NUM_KEPT if self._kind.cuts else None)
            self._laws[:, j].copy_(laws)
            drawn, _ = inverse_cdf(laws.double().exp(), self._uniforms[:, j])
            chosen = torch.where(self._temperatures > 0, drawn, chosen)
        finite = logits.sum(dim=1).isfinite()
        self._ids[:, j].copy_(torch.where(finite, chosen, -1))
        self._best[:, j].copy_(best)
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


def draft_laws(logits: Tensor, temperatures: Tensor, num_kept: int | None) -> Tensor:
    """logits [B, V] float32, temperatures [B] float32 -> [B, V] float32 log-probs, -inf outside the best num_kept.

    As `sampling` computes them for requests without other parameters; a temperature of 0 counts as 1.
    """
    scale = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    laws = ((logits - logits.amax(dim=1, keepdim=True)) / scale).log_softmax(dim=1)
    return laws if num_kept is None else truncate_topk(laws, num_kept)
