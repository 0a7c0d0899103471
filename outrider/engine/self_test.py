"""Does our cache compute what the model computes without one? Asked once, at load, with the real weights.

A class that keeps state elsewhere, takes positions in its own way or ignores the mask gives wrong text without any
error otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.kv_pool import BlockTable
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row

NUM_BLOCKS = 16
"""Of 16 tokens: enough for the three sequences below."""
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 1.5e-1}
"""Largest logit difference allowed, as a share of the largest logit. A wrong position or mask gives about 1."""


class Remembered:
    """A model's logits without a cache, each sequence computed once: the self-test always asks for the same ones, so a
    second test of a model whose weights were packed meanwhile is held against the plain ones."""

    def __init__(self, model: UncachedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Tensor] = {}

    def forward(self, token_ids: Sequence[int]) -> Tensor:
        """-> [T, V] float32."""
        key = tuple(token_ids)
        if key not in self._known:
            self._known[key] = self._model.forward(token_ids)
        return self._known[key]


@dataclass
class _Sequence:
    """Tokens fed so far, in one table, and how far from the truth their logits were."""

    runner: ModelRunner
    model: UncachedModel | Remembered
    ids: list[int]
    table: BlockTable
    num_cached: int = 0
    errors: list[float] = field(default_factory=list)

    def row(self, end: int, num_logits: int) -> Row:
        return Row.of(self.table, self.ids[:end], self.num_cached, num_logits)

    def take(self, row: Row, logits: Tensor) -> None:
        self.num_cached = row.num_tokens
        if row.num_logits:
            truth = self.model.forward(row.last_ids(row.num_tokens))[-row.num_logits :]
            self.errors.append(float((logits - truth).abs().max() / truth.abs().max()))

    def rewrite(self, keep: int, generator: random.Random) -> None:
        """Forget all but `keep` tokens and go on otherwise, as after a rejection."""
        self.table.truncate(keep)
        self.num_cached = min(self.num_cached, keep)
        self.ids[keep:] = [generator.randrange(self.runner.facts.vocab_size) for _ in self.ids[keep:]]


def largest_error(runner: ModelRunner, model: UncachedModel | Remembered) -> float:
    """Prefill, decode, verify and roll back ragged rows; the largest logit difference as a share of the largest logit.

    Whatever the model raises comes through. The runner's pool must have NUM_BLOCKS free.
    """
    generator = random.Random(0)
    longest = min(48, runner.facts.context_limit)
    lengths = [longest, max(longest // 3, 8), max(longest // 2, 8)]
    vocab_size = runner.facts.vocab_size
    a, b, c = (
        _Sequence(runner, model, [generator.randrange(vocab_size) for _ in range(n)], runner.pool.new_table())
        for n in lengths
    )
    with torch.inference_mode():
        _step(runner, [(a, len(a.ids) - 7, 0), (b, len(b.ids) - 6, 1)])  # two prompts of different length
        _step(runner, [(a, len(a.ids) - 1, 6), (b, len(b.ids) - 5, 1), (c, len(c.ids) - 6, 0)])  # verify, decode, join
        a.rewrite(len(a.ids) - 5, generator)  # one of five drafts kept
        _step(runner, [(a, len(a.ids) - 4, 1), (b, len(b.ids), 5), (c, len(c.ids) - 4, 2)])
        b.rewrite(len(b.ids) - 4, generator)
        _step(runner, [(b, len(b.ids), 4)])  # alone
    for sequence in (a, b, c):
        sequence.table.free()
    return max(error for sequence in (a, b, c) for error in sequence.errors)


def _step(runner: ModelRunner, feeds: list[tuple[_Sequence, int, int]]) -> None:
    rows = [sequence.row(end, num_logits) for sequence, end, num_logits in feeds]
    parts = runner.forward(rows).split([row.num_logits for row in rows])
    for (sequence, _, _), row, logits in zip(feeds, rows, parts, strict=True):
        sequence.take(row, logits)
