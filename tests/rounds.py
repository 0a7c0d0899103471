"""A fixed course of ragged prefills, decodes, verifies and rollbacks over a runner, against a forward without cache."""

from __future__ import annotations

import random
from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row

Truth = Callable[[list[int]], Tensor]
"""[T] ids -> [T, V] float32, from transformers alone."""


def some_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def truth_of(model: PreTrainedModel) -> Truth:
    """Every distinct sequence is computed once."""
    uncached, known = UncachedModel(model), dict[tuple[int, ...], Tensor]()

    def truth(ids: list[int]) -> Tensor:
        key = tuple(ids)
        if key not in known:
            known[key] = uncached.forward(ids)
        return known[key]

    return truth


class Fed:
    """A sequence and the expectation for every logit it is asked for.

    relative: an error is a share of the largest logit.
    """

    def __init__(self, runner: ModelRunner, expected: Truth, ids: list[int], *, relative: bool = False) -> None:
        self.table, self.ids, self.num_cached = runner.pool.new_table(), ids, 0
        self._vocab_size = runner.facts.vocab_size
        self._expected = expected
        self._relative = relative

    def row(self, end: int, num_logits: int) -> Row:
        return Row.of(self.table, self.ids[:end], self.num_cached, num_logits)

    def error(self, row: Row, logits: Tensor) -> float:
        self.num_cached = row.num_tokens
        if not row.num_logits:
            return 0.0
        expected = self._expected(row.last_ids(row.num_tokens))[-row.num_logits :]
        scale = expected.abs().max() if self._relative else 1.0
        return float((logits - expected).abs().max() / scale)

    def roll_back(self, keep: int, seed: int) -> None:
        self.table.truncate(keep)
        self.num_cached = keep
        self.ids = self.ids[:keep] + some_ids(max(60, len(self.ids) - keep), self._vocab_size, seed)


def step(runner: ModelRunner, feeds: list[tuple[Fed, int, int]]) -> float:
    """One forward of (sequence, its new end, logits wanted); the largest error."""
    rows = [sequence.row(end, num_logits) for sequence, end, num_logits in feeds]
    parts = runner.forward(rows).split([row.num_logits for row in rows])
    return max(sequence.error(row, logits) for (sequence, _, _), row, logits in zip(feeds, rows, parts, strict=True))


def largest_error(runner: ModelRunner, truth: Truth) -> float:
    """Four sequences of up to 64 tokens, through everything that a service does with rows. NaN if any logit is."""
    a, b, c, d = (Fed(runner, truth, some_ids(110, runner.facts.vocab_size, seed)) for seed in range(4))
    steps = [
        [(a, 40, 0), (b, 9, 1), (c, 3, 1)],  # prompts: wide, narrow, very short
        [(a, 57, 1), (b, 10, 1), (c, 4, 1), (d, 20, 0)],  # the rest of a prompt among decodes, another joins
        [(a, 63, 6), (b, 16, 6), (c, 10, 6), (d, 21, 1)],  # verify K = 5, and one plain step
    ]
    errors = [step(runner, feeds) for feeds in steps]
    a.roll_back(58, 10)  # all refused
    b.roll_back(13, 11)  # two kept
    c.roll_back(5, 12)
    errors.append(step(runner, [(a, 64, 6), (b, 15, 2), (c, 6, 1), (d, 27, 6)]))  # ragged K
    d.table.free()  # leaves in between
    a.roll_back(16, 13)  # far back, to the edge of a block
    errors.append(step(runner, [(a, 17, 1), (b, 16, 1), (c, 12, 6)]))
    errors.append(step(runner, [(a, 23, 6)]))  # alone
    for sequence in (a, b, c):
        sequence.table.free()
    return float("nan") if any(error != error for error in errors) else max(errors)
