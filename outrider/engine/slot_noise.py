"""Uniforms for slots: the generator keyed by a request's seed, its choice and the position being decided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.noise import Purpose, uniforms
from outrider.wire.params import SamplingParams


def slot_uniforms(
    params: Sequence[SamplingParams], positions: Sequence[int], purpose: Purpose, device: torch.device
) -> Tensor:
    """One uniform per (params, position): [N] float64 in (0, 1)."""
    seeds = torch.tensor([_signed(p.seed) for p in params], dtype=torch.int64, device=device)
    choices = torch.tensor([p.choice for p in params], dtype=torch.int64, device=device)
    at = torch.tensor(positions, dtype=torch.int64, device=device)
    return uniforms(seeds, choices, at, purpose)


def _signed(seed: int) -> int:
    """64 unsigned bits as the int64 with the same bits."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
