"""The noise with which the target draws its own tokens, and the token that it picks.

Every position of a request has a Gumbel number for each vocabulary id, a function of (seed, choice, position, id)
alone. argmax(log-prob + Gumbel) is an exact draw from the law (Gumbel-max: Maddison, Tarlow and Minka, "A* sampling",
NeurIPS 2014, section 2). Under `coupled` all tokens come so, and a draft that uses the same numbers guesses them with
probability at least (1 - TV) / (1 + TV) (Daliri, Musco and Musco, "Coupling without communication and drafter-invariant
speculative decoding", 2024, section 3). Under `rejection` plain, bonus and recovered tokens do: drafts are drawn and
kept with other numbers, and a draft may rank by these what it prepares for (exact by enumeration:
tests/unit/outrider/engine/sampling/test_overlap_law.py).

Which id wins must not depend on the device: the integer bits are Philox's, and `fixed_log` is a fixed sequence of IEEE
operations, in place of a library's logarithm, whose last bits differ. `coupled_ids` is the law in torch, for a batch of
rows on any device, and waits for nothing; `coupled_id` gives the same ids row by row on the host, with logarithms for
the few that may win, and stays for what it saves of a step: `host_sampling.py` says how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.native.library import loaded
from outrider.engine.sampling.noise import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS, WORD, Purpose
from outrider.engine.sampling.row_law import Array, Ids, NothingToDraw, RowLaw, Weights
from outrider.wire.requests.params import SamplingParams

MAX_NUMBERS = 1 << 23
"""Numbers that are computed at once on a device: a dozen arrays of 8 bytes each live at a time, 0.8 GB."""
_ROUNDING = 1.0 + 1e-9
"""More than what is rounded here. In noise.h, too."""
LN2 = math.log(2.0)
ROOT_HALF = math.sqrt(0.5)
LOG_TERMS = tuple(1.0 / (2 * k + 1) for k in range(11, 0, -1))
"""Coefficients of artanh's series, the last first: their rest is below 2^-54 where |t| <= 0.1716."""


def coupled_id(law: RowLaw, params: SamplingParams, position: int) -> int:
    """Return the id that comes at `position` of the sequence; the lowest among equals. Raises NothingToDraw."""
    return law.id_of(_place(law.weights, law.ids, params, position, lambda places: law.scores[places]))


def coupled_place(weights: Weights, ids: Ids | None, params: SamplingParams, position: int) -> int:
    """Return the place that comes at `position` by weights [N] float64, not normalised, of ids [N] (None: 0 .. N - 1).
    Raises NothingToDraw.
    """
    return _place(weights, ids, params, position, lambda places: np.log(weights[places]))


def _place(
    weights: Weights, ids: Ids | None, params: SamplingParams, position: int, logs: Callable[[Ids], Array]
) -> int:
    """Return the place that comes. logs: of the weights at these places, to which the Gumbel numbers are added."""
    places = _may_win(weights, ids, params, position)
    if places.size > 1:
        u = uniforms(params, position, places if ids is None else ids[places])
        places = places[(logs(places) + gumbels_of(u)).argmax(keepdims=True)]
    return int(places[0])


def coupled_ranked(law: RowLaw, params: SamplingParams, position: int, num: int) -> tuple[list[int], list[float]]:
    """Return the `num` ids that are most likely to come at `position`, best first; all where the law has no more.

    With each the probability that the target says it, given the noise, if its law is about the draft's: exp(score +
    Gumbel) over the sum of all. The first is `coupled_id`, near ties excepted: a guess need not be right. Raises
    NothingToDraw.
    """
    u = uniforms(params, position, law.scores.size if law.ids is None else law.ids)
    weights = np.exp(law.scores, dtype=np.float64) / -np.log(u)  # [N], exp(score + Gumbel) up to rounding
    total = float(weights.sum())
    if not 0.0 < total < math.inf:
        raise NothingToDraw(f"nothing to draw from: the row sums to {total}")
    places = np.flatnonzero(weights)
    if places.size > num:
        places = places[np.argpartition(weights[places], places.size - num)[-num:]]
    places = places[np.argsort(-weights[places])]
    return [law.id_of(int(place)) for place in places], (weights[places] / total).tolist()


def _may_win(weights: Weights, ids: Ids | None, params: SamplingParams, position: int) -> Ids:
    """Return places [M], ascending, of which one has the largest log(weight) + Gumbel: logarithms for these alone.

    The winner has the least E / weight, E = -log(u). As 1 - u <= E <= (1 - u) / u, nobody wins
    whose (1 - u) / weight is above another's (1 - u) / u / weight. No weight is infinite, where the two ways would
    differ: a law has none far above 1, nor has what a rejection leaves of it. Raises NothingToDraw.
    """
    native, weights = loaded(), np.ascontiguousarray(weights, dtype=np.float64)
    if native is None:
        u = uniforms(params, position, weights.size if ids is None else ids)
        with np.errstate(divide="ignore", invalid="ignore"):
            least = (1.0 - u) / weights  # [N]; inf without weight
        most = np.fmin.reduce(least / u, initial=math.inf)
        places = np.flatnonzero((least <= most * _ROUNDING) & (least < math.inf))
    else:
        places = np.empty(weights.size, dtype=np.int64)
        where = (None if ids is None else ids.ctypes.data, weights.size, weights.ctypes.data, places.ctypes.data)
        places = places[: native.outrider_may_win(params.seed, position, _purpose(params), *where)]
    if not places.size:
        raise NothingToDraw("nothing to draw from: the row has no positive finite mass")
    return places


def uniforms(params: SamplingParams, position: int, ids: Ids | int) -> Weights:
    """Return the numbers of vocabulary ids [N] int64, or of 0 .. ids - 1: [N] float64 in (0, 1), 53 bits each.

    Two ids share a counter, (id // 2, position, purpose + 256 choice, 0): even ones have its first two words.
    """
    native = loaded()
    if native is None:
        every = np.arange(ids) if isinstance(ids, int) else ids
        pairs = _pairs(torch.tensor([_key(params, position)]), torch.from_numpy(every >> 1))[0].numpy()
        return pairs[np.arange(every.size), every & 1]  # type: ignore[no-any-return]
    out = np.empty(ids if isinstance(ids, int) else ids.size)
    address = None if isinstance(ids, int) else ids.ctypes.data
    native.outrider_id_uniforms(params.seed, position, _purpose(params), address, out.size, out.ctypes.data)
    return out


def _purpose(params: SamplingParams) -> int:
    return params.choice << 8 | Purpose.TARGET


def _key(params: SamplingParams, position: int) -> tuple[int, int, int, int]:
    """Return the seed's low and high word, the purpose word and the position."""
    return params.seed & WORD, params.seed >> 32, _purpose(params), position


def gumbels_of(u: Array) -> Array:
    """Return -log(-log(u)), the same bits on every device. u: float64 in (0, 1), of NumPy or torch."""
    return -fixed_log(-fixed_log(u))


def fixed_log(x: Array) -> Array:
    """Return the natural logarithm of positive normal doubles, of NumPy or torch, to a few units in the last place, by
    additions, multiplications and divisions alone: log(m 2^e) = 2 artanh((m - 1) / (m + 1)) + e log 2 with m in
    [sqrt(1/2), sqrt(2)). Nothing here may be fused into a multiply-add.
    """
    lib: Any = torch if isinstance(x, Tensor) else np
    m, e = lib.frexp(x)
    low = m < ROOT_HALF
    m, e = lib.where(low, m + m, m), lib.where(low, e - 1, e)
    t = (m - 1.0) / (m + 1.0)
    s = t * t
    series = lib.full_like(s, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        series = series * s
        series = series + term
    t = t + t
    tail = t * (s * series)
    whole = e * lib.full_like(s, LN2)
    result: Array = (t + tail) + whole
    return result


def coupled_ids(log_probs: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Return the id that comes at each position; the lowest among equals. [R, V] float32, [R], [R] -> [R] int64.

    A row without a finite score gives any id: whoever cannot rule that out looks at it.
    """
    return picked(log_probs, device_keys(params, positions, log_probs.device))


def device_keys(params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device) -> Tensor:
    """Return what the numbers of these positions are keyed with, [R, 4] int64, the position last."""
    keys = [_key(p, position) for p, position in zip(params, positions, strict=True)]
    return to_device(np.array(keys, dtype=np.int64), device)


def picked(log_weights: Tensor, keys: Tensor) -> Tensor:
    """Return the id that the numbers of each row pick, the lowest among equals. [R, V], keys [R, 4] -> [R] int64."""
    step = max(1, MAX_NUMBERS // log_weights.shape[1])
    parts = [
        (log_weights[i : i + step].double() + gumbels(keys[i : i + step], log_weights.shape[1])).argmax(dim=1)
        for i in range(0, len(log_weights), step)
    ]
    return torch.cat(parts)


def gumbels(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the Gumbel numbers [R, V] float64 of ids 0 .. V - 1; keys [R, 4] int64: as `_key`."""
    counters = torch.arange((vocab_size + 1) // 2, device=keys.device)
    return gumbels_of(_pairs(keys, counters).flatten(1)[:, :vocab_size])


def _pairs(keys: Tensor, counters: Tensor) -> Tensor:
    """Return [R, N, 2] float64 in (0, 1), of the even id and of the odd one; counters [N] int64: ids // 2."""
    low, high, purpose, position = (column[:, None] for column in keys.unbind(1))  # [R, 1] each
    words = _philox4x32((counters[None], position, purpose, torch.zeros_like(position)), low, high)  # [R, N] each
    bits = torch.stack([words[i] << 21 | words[i + 1] >> 11 for i in (0, 2)], dim=2)
    return bits.double().clamp_min(0.5) * 2.0**-53


def _philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], low: Tensor, high: Tensor) -> list[Tensor]:
    """Run ten rounds over int64 tensors below 2^32 that broadcast. A product wraps into the sign; its bits are the
    same.
    """
    c0, c1, c2, c3 = counter
    for _ in range(NUM_ROUNDS):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (odd >> 32 & WORD) ^ c1 ^ low, odd & WORD
        c2, c3 = (even >> 32 & WORD) ^ c3 ^ high, even & WORD
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))
