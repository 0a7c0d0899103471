"""How long answers become, learnt from those that ended: who will say little need not be drafted for. Pure.

Kaplan and Meier's estimate: of the answers that came as far, the share that stopped there by themselves; those that
were cut off count up to their end.
"""

from __future__ import annotations

MEMORY = 1 - 1 / 256
"""What an answer's weight becomes with each later one."""
NUM_CLASSES = 24
"""By powers of two: class i holds lengths from 2^i to 2^(i+1) - 1."""
DOUBT = 4.0
"""Answers that never stop, at the weight of so many seen."""


class AnswerLengths:
    """One per served model."""

    def __init__(self) -> None:
        self._came = [0.0] * NUM_CLASSES
        """Answers that came into each class."""
        self._stopped = [0.0] * NUM_CLASSES

    def ended(self, num_tokens: int, stopped: bool) -> None:
        """stopped: by itself; else it was cut off there."""
        last = _class_of(num_tokens)
        self._came = [MEMORY * num + (at <= last) for at, num in enumerate(self._came)]
        self._stopped = [MEMORY * num + (stopped and at == last) for at, num in enumerate(self._stopped)]

    def remaining(self, num_output: int, max_tokens: int) -> float:
        """Tokens still to be expected of an answer that has `num_output` and may have `max_tokens`."""
        expected, share, length = 0.0, 1.0, num_output
        while length < max_tokens:
            at = _class_of(length)
            end = max_tokens if at == NUM_CLASSES - 1 else min(max_tokens, 2 << at)
            ends = self._stopped[at] / (self._came[at] + DOUBT)
            expected += share * (1.0 - ends / 2) * (end - length)
            share *= 1.0 - ends
            length = end
        return expected


def _class_of(num_tokens: int) -> int:
    return min(max(1, num_tokens).bit_length(), NUM_CLASSES) - 1
