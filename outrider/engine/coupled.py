"""Coupled acceptance: the noise that target and draft share, and the token that it picks. NumPy on the host.

Every position of a request has a Gumbel number for each vocabulary id, a function of (seed, choice, position, id)
alone. argmax(log-prob + Gumbel) is an exact draw from the law (Gumbel-max: Maddison, Tarlow and Minka, "A* sampling",
NeurIPS 2014, section 2), so the target's tokens depend on nothing else; a draft that uses the same numbers guesses them
with probability at least (1 - TV) / (1 + TV) (Daliri, Musco and Musco, "Coupling without communication and
drafter-invariant speculative decoding", 2024, section 3). Used by the proposer and the verifier; `device_coupled.py`
does the same for a batch on a device.

Which id wins must not depend on the device: the integer bits are Philox's, and `fixed_log` is a fixed sequence of IEEE
operations, in place of a library's logarithm, whose last bits differ.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.engine.candidates import Ids, Scores, Weights
from outrider.engine.native.library import loaded
from outrider.engine.noise import Purpose, host_philox4x32, unit_doubles
from outrider.engine.row_law import NothingToDraw, RowLaw
from outrider.wire.params import SamplingParams

_ROUNDING = 1.0 + 1e-5
"""More than that of a float32 exponential."""
LN2 = math.log(2.0)
ROOT_HALF = math.sqrt(0.5)
LOG_TERMS = tuple(1.0 / (2 * k + 1) for k in range(11, 0, -1))
"""Of artanh's series, the last first: their rest is below 2^-54 where |t| <= 0.1716."""


def coupled_id(law: RowLaw, params: SamplingParams, position: int) -> int:
    """The id that comes at `position` of the sequence; the lowest among equals. Raises NothingToDraw."""
    u = uniforms(params, position, law.scores.size if law.ids is None else law.ids)
    places = _may_win(law.scores, u)
    if places.size > 1:
        places = places[(law.scores[places] + gumbels_of(u[places])).argmax(keepdims=True)]
    return law.id_of(int(places[0]))


def coupled_ranked(law: RowLaw, params: SamplingParams, position: int, num: int) -> tuple[list[int], list[float]]:
    """The `num` ids that are most likely to come at `position`, best first; all where the law has no more.

    With each the probability that the target says it, given the noise, if its law is about the draft's: exp(score +
    Gumbel) over the sum of all. The first is `coupled_id`. Raises NothingToDraw.
    """
    u = uniforms(params, position, law.scores.size if law.ids is None else law.ids)
    weights = np.exp(law.scores, dtype=np.float64) / -np.log(u)  # [N], exp(score + Gumbel) up to rounding
    total = float(weights.sum())
    if not 0.0 < total < math.inf:
        raise NothingToDraw(f"nothing to draw from: the row sums to {total}")
    places = np.flatnonzero(weights)
    if places.size > num:  # the logarithm's rounding must not leave one out that `coupled_id` would choose
        edge = np.partition(weights[places], places.size - num)[places.size - num]
        places = places[weights[places] * _ROUNDING >= edge]
    places = places[np.argsort(-(law.scores[places] + gumbels_of(u[places])), kind="stable")][:num]
    return [law.id_of(int(place)) for place in places], (weights[places] / total).tolist()


def _may_win(scores: Scores, u: Weights) -> Ids:
    """Places [M], ascending, of which one has the largest score + Gumbel: logarithms for these alone.

    The winner has the least E / weight, E = -log(u), weight = exp(score). As 1 - u <= E <= (1 - u) / u, nobody wins
    whose (1 - u) / weight is above another's E / weight. Raises NothingToDraw.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        least = (1.0 - u) / np.exp(scores)  # [N]; inf without weight
    first = int(least.argmin())
    if not least[first] < math.inf:
        raise NothingToDraw("nothing to draw from: the row has no positive finite mass")
    return np.flatnonzero(least <= least[first] / u[first] * _ROUNDING)


def uniforms(params: SamplingParams, position: int, ids: Ids | int) -> Weights:
    """Of vocabulary ids [N] int64, or of 0 .. ids - 1: [N] float64 in (0, 1), 53 bits each.

    Two ids share a counter, (id // 2, position, purpose + 256 choice, 0): even ones have its first two words.
    """
    native = loaded()
    if native is None:
        return _numpy_uniforms(params, position, ids)
    out = np.empty(ids if isinstance(ids, int) else ids.size)
    address = None if isinstance(ids, int) else ids.ctypes.data
    native.outrider_id_uniforms(params.seed, position, _purpose(params), address, out.size, out.ctypes.data)
    return out


def _purpose(params: SamplingParams) -> int:
    return params.choice << 8 | Purpose.COUPLED


def _numpy_uniforms(params: SamplingParams, position: int, ids: Ids | int) -> Weights:
    """Where the C++ is not in use."""
    num_counters = (ids + 1) // 2 if isinstance(ids, int) else ids.size
    counter = np.zeros((4, num_counters), dtype=np.uint64)
    counter[0] = np.arange(num_counters) if isinstance(ids, int) else ids >> 1
    counter[1], counter[2] = position, _purpose(params)
    key = np.empty((2, num_counters), dtype=np.uint64)
    key[0], key[1] = params.seed & 0xFFFFFFFF, params.seed >> 32
    words = host_philox4x32(counter, key)
    if isinstance(ids, int):
        even, odd = unit_doubles(words[0], words[1]), unit_doubles(words[2], words[3])
        return np.stack((even, odd), axis=1).ravel()[:ids]
    odd_id = (ids & 1).astype(bool)
    return unit_doubles(np.where(odd_id, words[2], words[0]), np.where(odd_id, words[3], words[1]))


def gumbels_of(u: Weights) -> Weights:
    """-log(-log(u)), the same bits on every device. u: [N] float64 in (0, 1)."""
    return -fixed_log(-fixed_log(u))


def fixed_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive normal doubles, to a few units in the last place, by additions, multiplications
    and divisions alone: log(m 2^e) = 2 artanh((m - 1) / (m + 1)) + e log 2 with m in [sqrt(1/2), sqrt(2)).
    """
    m, e = np.frexp(x)
    low = m < ROOT_HALF
    m, e = np.where(low, m + m, m), e - low
    t = (m - 1.0) / (m + 1.0)
    s = t * t
    series = np.full_like(s, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        series = series * s + term
    t = t + t
    return (t + t * (s * series)) + e * LN2
