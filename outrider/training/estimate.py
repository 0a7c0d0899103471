"""Estimate before a training how much it needs: time, by the measured speed of this machine, memory and disk.

Called by `train_head`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from outrider.training.run import peak_bytes

TRIAL_S = 0.2
"""Seconds for which each of two matrix products is repeated to time it: one of the size used in generating text, one of
the size used in training."""
TRIAL_WIDTH = 1024
"""Rows and columns of the square weight matrix whose products are timed: 4 MiB in float32, more than a core's cache."""
GENERATED_AT_ONCE = 64
"""Number of rows (one per output) of a forward while text is generated."""
FLOAT_BYTES = 4
ADAM_FLOATS = 4
"""Number of floats in memory for each trained parameter: the parameter, its gradient and two moments of the
optimizer."""
SAVED_FLOATS = 4
"""Number of floats on disk for each trained parameter: three in the checkpoint, and one in the result."""


@dataclass(frozen=True, slots=True)
class TrainingSizes:
    """Sizes of a training, such as numbers of parameters and tokens, from which its time, memory and disk space are
    estimated.
    """

    num_target_parameters: int
    num_trained_parameters: int
    vocab_size: int
    num_answers: int
    """Number of outputs that the target generates: those to train on and those on which acceptance is measured."""
    max_tokens: int
    """Maximum number of tokens of an output."""
    prompt_tokens: int
    """Mean number of tokens of a prompt."""
    updates: int
    batch_size: int
    """Number of outputs that one update of the weights trains on."""
    depth: int
    """Number of draft tokens of a round that are trained: after each token of the text, this number of draft tokens
    have a loss."""

    @property
    def generation_flops(self) -> float:
        """Floating-point operations to generate the text: two for each parameter and token."""
        return 2.0 * self.num_target_parameters * self.num_answers * (self.max_tokens + self.prompt_tokens)

    @property
    def training_flops(self) -> float:
        """Floating-point operations to train: the target's forward, and the student's forward and backward."""
        num_tokens = self.updates * self.batch_size * (self.max_tokens + self.prompt_tokens)
        return num_tokens * (2.0 * self.num_target_parameters + 6.0 * self.num_trained_parameters * self.depth)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the training needs: for the target, for the student with its optimizer, and for three
        copies of the logits of a batch.
        """
        num_logits = 3 * self.batch_size * self.max_tokens * self.vocab_size
        return FLOAT_BYTES * (self.num_target_parameters + ADAM_FLOATS * self.num_trained_parameters + num_logits)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk that the training needs: for the generated text, the checkpoint and the result."""
        num_tokens = self.num_answers * (self.max_tokens + self.prompt_tokens)
        return FLOAT_BYTES * (num_tokens + SAVED_FLOATS * self.num_trained_parameters)


def describe(sizes: TrainingSizes, device: str) -> str:
    """Return a line of text with the estimated time, memory and disk space of a training.

    The function times matrix products on `device`, which takes about half a second. The estimated memory includes what
    this process uses already.
    """
    memory_bytes = peak_bytes() + sizes.memory_bytes
    writing_s = sizes.generation_flops / flops_per_s(GENERATED_AT_ONCE, device)
    training_s = sizes.training_flops / flops_per_s(sizes.batch_size * sizes.max_tokens, device)
    return (
        f"about {_time(writing_s)} to write text and {_time(training_s)} to train, by this machine's matrix products; "
        f"{_size(memory_bytes)} of memory and {_size(sizes.disk_bytes)} of disk"
    )


def flops_per_s(num_rows: int, device: str) -> float:
    """Measure the speed of float32 matrix products on `device`, in floating-point operations per second. The matrices
    are `num_rows` (at most 1024) x TRIAL_WIDTH and TRIAL_WIDTH x TRIAL_WIDTH.
    """
    weights = torch.ones(TRIAL_WIDTH, TRIAL_WIDTH, device=device)
    rows = torch.ones(min(num_rows, 1024), TRIAL_WIDTH, device=device)
    rows @ weights  # the first is slower
    num_done = 0
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < TRIAL_S:
        product = rows @ weights
        num_done += 1
    float(product[0, 0])  # waits for a GPU
    elapsed_s = time.perf_counter() - start_s
    return 2.0 * rows.shape[0] * TRIAL_WIDTH**2 * num_done / elapsed_s


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _size(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{max(1, round(num_bytes / 1e6))} MB"
