"""Say before a training what it will take: time by this machine's own speed, memory and disk."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from outrider.training.run import peak_bytes

TRIAL_S = 0.2
"""Seconds for which matrix products are timed, by rows of either kind."""
TRIAL_WIDTH = 1024
"""Inputs and outputs of the product that is timed: 4 MB of weights in float32, more than a core's own cache."""
WRITTEN_AT_ONCE = 64
"""Rows of a step of the writing."""
FLOAT_BYTES = 4
ADAM_FLOATS = 4
"""Numbers for each that is trained: itself, its gradient and two moments."""
SAVED_FLOATS = 4
"""Numbers for each that is trained on disk: a checkpoint of three, and the head."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides what a training takes."""

    num_target_parameters: int
    num_trained_parameters: int
    vocab_size: int
    num_answers: int
    """That are written, those to measure on included."""
    max_tokens: int
    prompt_tokens: int
    updates: int
    batch_size: int
    depth: int

    @property
    def written_flops(self) -> float:
        """Two for each parameter and token."""
        return 2.0 * self.num_target_parameters * self.num_answers * (self.max_tokens + self.prompt_tokens)

    @property
    def trained_flops(self) -> float:
        """The target's forward, and forward and backward of what is trained for each draft token."""
        num_tokens = self.updates * self.batch_size * (self.max_tokens + self.prompt_tokens)
        return num_tokens * (2.0 * self.num_target_parameters + 6.0 * self.num_trained_parameters * self.depth)

    @property
    def memory_bytes(self) -> int:
        """The target, what is trained with its optimizer, and three tables of logits of a batch."""
        logits = 3 * self.batch_size * self.max_tokens * self.vocab_size
        return FLOAT_BYTES * (self.num_target_parameters + ADAM_FLOATS * self.num_trained_parameters + logits)

    @property
    def disk_bytes(self) -> int:
        text = self.num_answers * (self.max_tokens + self.prompt_tokens)
        return FLOAT_BYTES * (text + SAVED_FLOATS * self.num_trained_parameters)


def describe(sizes: Sizes, device: str) -> str:
    """Return the estimate in a line. Times matrix products on the device for half a second.

    What this process holds already, torch above all, is a part of the memory.
    """
    memory_bytes = peak_bytes() + sizes.memory_bytes
    writing_s = sizes.written_flops / flops_per_s(WRITTEN_AT_ONCE, device)
    training_s = sizes.trained_flops / flops_per_s(sizes.batch_size * sizes.max_tokens, device)
    return (
        f"about {_time(writing_s)} to write text and {_time(training_s)} to train, by this machine's matrix products; "
        f"{_size(memory_bytes)} of memory and {_size(sizes.disk_bytes)} of disk"
    )


def flops_per_s(num_rows: int, device: str) -> float:
    """Return the floating-point operations a second of a product of so many rows."""
    weights = torch.ones(TRIAL_WIDTH, TRIAL_WIDTH, device=device)
    rows = torch.ones(min(num_rows, 1024), TRIAL_WIDTH, device=device)
    rows @ weights  # the first is slower
    num_done, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < TRIAL_S:
        product = rows @ weights
        num_done += 1
    float(product[0, 0])  # a GPU is waited for
    elapsed_s = time.perf_counter() - began_s
    return 2.0 * rows.shape[0] * TRIAL_WIDTH**2 * num_done / elapsed_s


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{max(1, round(num_bytes / 1e6))} MB"
