"""Uniforms for slots: the generator keyed by a request's seed, its choice and the position being decided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.noise import Purpose, host_uniforms
from outrider.wire.params import SamplingParams


def host_slot_uniforms(
    params: Sequence[SamplingParams], positions: Sequence[int], purposes: Sequence[Purpose]
) -> NDArray[np.float64]:
    """One uniform per purpose and (params, position): [P, N] in (0, 1).

    All at once: the generator costs some 70 small operations a call, however many numbers it makes.
    """
    count, repeats = len(params), len(purposes)
    columns = [[p.seed for p in params] * repeats, [p.choice for p in params] * repeats, list(positions) * repeats]
    kinds = np.repeat(np.array(purposes, dtype=np.uint64), count)
    seeds, choices, at = np.array(columns, dtype=np.uint64)
    return host_uniforms(seeds, choices, at, kinds).reshape(repeats, count)


def slot_uniforms(
    params: Sequence[SamplingParams], positions: Sequence[int], purposes: Sequence[Purpose], device: torch.device
) -> Tensor:
    """`host_slot_uniforms` on `device`: [P, N] float64."""
    return to_device(host_slot_uniforms(params, positions, purposes), device)
