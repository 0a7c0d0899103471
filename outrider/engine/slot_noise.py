"""Uniforms for slots: the generator keyed by a request's seed, its choice, the position being decided and the round."""

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
    params: Sequence[SamplingParams],
    rounds: Sequence[int],
    positions: Sequence[int],
    purposes: Sequence[Purpose],
    candidates: Sequence[int] | None = None,
) -> NDArray[np.float64]:
    """One uniform per purpose and (params, round, position, candidate): [P, N] in (0, 1). rounds: committed_len of each
    one's. candidates: 0 for all when None.

    All at once: the generator costs some 70 small operations a call, however many numbers it makes.
    """
    count, repeats = len(params), len(purposes)
    which = [0] * count if candidates is None else list(candidates)
    each = [[p.seed for p in params], [p.choice for p in params], list(positions), list(rounds), which]
    kinds = np.repeat(np.array(purposes, dtype=np.uint64), count)
    seeds, choices, at, within, drawn = np.tile(np.array(each, dtype=np.uint64), repeats)
    return host_uniforms(seeds, choices, at, kinds, within, drawn).reshape(repeats, count)


def slot_uniforms(
    params: Sequence[SamplingParams],
    rounds: Sequence[int],
    positions: Sequence[int],
    purposes: Sequence[Purpose],
    device: torch.device,
) -> Tensor:
    """`host_slot_uniforms` on `device`: [P, N] float64."""
    return to_device(host_slot_uniforms(params, rounds, positions, purposes), device)
