"""Uniforms for slots: the generator keyed by a request's seed, its choice and the position being decided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.noise import Purpose, uniforms
from outrider.wire.params import SamplingParams


def slot_uniforms(
    params: Sequence[SamplingParams], positions: Sequence[int], purposes: Sequence[Purpose], device: torch.device
) -> Tensor:
    """One uniform per purpose and (params, position): [P, N] float64 in (0, 1).

    All at once: the generator costs some 200 small operations a call, however many numbers it makes.
    """
    count, repeats = len(params), len(purposes)
    keys = [[_signed(p.seed) for p in params] * repeats, [p.choice for p in params] * repeats]
    counts = [list(positions) * repeats, [int(purpose) for purpose in purposes for _ in range(count)]]
    seeds, choices, at, kinds = torch.tensor([*keys, *counts], dtype=torch.int64, device=device)
    return uniforms(seeds, choices, at, kinds).view(repeats, count)


def _signed(seed: int) -> int:
    """64 unsigned bits as the int64 with the same bits."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
