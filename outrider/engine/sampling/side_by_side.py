"""Work on the rows of a step in torch's threads: NumPy lets go of the interpreter, but uses one thread a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from outrider.engine.sampling.penalties import NonFiniteLogits

Item = TypeVar("Item")
Result = TypeVar("Result")

WORTH_THREADS = 2**21
"""Logits in a step from which threads pay for their start: some 16 rows of a vocabulary of 128k."""


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], num_logits: int
) -> list[Result | NonFiniteLogits]:
    """Return `work` of each item, in order, or the error of one that raises it. The threads end with the call."""

    def caught(item: Item) -> Result | NonFiniteLogits:
        try:
            return work(item)
        except NonFiniteLogits as error:
            return error

    num_threads = min(torch.get_num_threads(), len(items))
    if num_threads < 2 or num_logits < WORTH_THREADS:
        return [caught(item) for item in items]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="sampling") as pool:
        return list(pool.map(caught, items))
