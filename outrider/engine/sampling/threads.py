"""Run NumPy work on a step's slots in several threads: NumPy releases the interpreter, and a call uses one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from outrider.engine.sampling.penalties import NonFiniteLogits

Item = TypeVar("Item")
Result = TypeVar("Result")

WORTH_THREADS = 2**21
"""Number of logits of a step from which starting threads pays: some 16 rows of a vocabulary of 128k."""


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], num_logits: int
) -> list[Result | NonFiniteLogits]:
    """Return for each item, in order, the result of `work(item)` or the NonFiniteLogits that it raised. Items run in
    several threads if num_logits (of the whole step) is at least WORTH_THREADS; the threads end with the call.
    """

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
