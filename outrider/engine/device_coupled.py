"""`coupled.py` for a batch of rows on a device: the same integers, the same doubles, and so the same ids for the same
laws. The host waits for nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.coupled import LN2, LOG_TERMS, ROOT_HALF
from outrider.engine.cuda.host_copy import to_device
from outrider.engine.noise import Purpose
from outrider.wire.params import SamplingParams

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MAX_AT_ONCE = 1 << 23
"""Numbers: a dozen arrays of 8 bytes each live at a time."""


def coupled_ids(log_probs: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """The id that comes at each position; the lowest among equals. [R, V] float32, [R], [R] -> [R] int64.

    A row without a finite score gives any id: whoever cannot rule that out looks at it.
    """
    keys = np.array([(p.seed & _WORD, p.seed >> 32, p.choice << 8 | Purpose.COUPLED) for p in params], dtype=np.int64)
    columns = to_device(np.concatenate((keys, np.array(positions, dtype=np.int64)[:, None]), axis=1), log_probs.device)
    step = max(1, _MAX_AT_ONCE // log_probs.shape[1])
    parts = [
        (log_probs[i : i + step].double() + gumbels(columns[i : i + step], log_probs.shape[1])).argmax(dim=1)
        for i in range(0, len(log_probs), step)
    ]
    return torch.cat(parts)


def gumbels(keys: Tensor, vocab_size: int) -> Tensor:
    """keys [R, 4] int64: seed's low and high word, purpose word, position -> [R, V] float64, of ids 0 .. V - 1."""
    num_counters = (vocab_size + 1) // 2
    low, high, purpose, position = (column[:, None] for column in keys.unbind(1))  # [R, 1] each
    counter = torch.arange(num_counters, device=keys.device)[None]
    words = _philox4x32((counter, position, purpose, torch.zeros_like(position)), low, high)  # [R, V / 2] each
    pairs = [words[i] << 21 | words[i + 1] >> 11 for i in (0, 2)]
    bits = torch.stack(pairs, dim=2).flatten(1)[:, :vocab_size]
    return -fixed_log(-fixed_log(bits.double().clamp_min(0.5) * 2.0**-53))


def fixed_log(x: Tensor) -> Tensor:
    """`coupled.fixed_log`, operation by operation: nothing here may be fused into a multiply-add."""
    m, e = torch.frexp(x)
    low = m < ROOT_HALF
    m, e = torch.where(low, m + m, m), e - low.to(e.dtype)
    t = (m - 1.0) / (m + 1.0)
    s = t * t
    series = torch.full_like(s, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        series = series * s
        series = series + term
    t = t + t
    tail = t * (s * series)
    whole = e.double() * LN2
    return (t + tail) + whole


def _philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], low: Tensor, high: Tensor) -> list[Tensor]:
    """Ten rounds over int64 tensors below 2^32 that broadcast. A product wraps into the sign: its bits are the same."""
    c0, c1, c2, c3 = counter
    for _ in range(_NUM_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (odd >> 32 & _WORD) ^ c1 ^ low, odd & _WORD
        c2, c3 = (even >> 32 & _WORD) ^ c3 ^ high, even & _WORD
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))
