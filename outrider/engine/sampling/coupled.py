"""The `coupled` acceptance rule, and the random numbers with which the target draws its own tokens under every rule.

Every position of a request has a Gumbel number for each vocabulary id, a function of (seed, choice, position, id)
alone. argmax(log-prob + Gumbel) is an exact draw from the distribution (Gumbel-max: Maddison, Tarlow and Minka, "A*
sampling", NeurIPS 2014, section 2). Under `coupled` all tokens are drawn this way. A draft token is accepted if it is
the id that the target picks, and a draft that picks with the same numbers proposes that id with probability at least (1
- TV) / (1 + TV) (Daliri, Musco and Musco, "Coupling without communication and drafter-invariant speculative decoding",
2024, section 3). Under `rejection` plain, bonus and recovered tokens are drawn this way. Draft tokens are drawn and
accepted with other numbers; a draft may order its recovery nodes by these (exact by enumeration:
tests/unit/outrider/engine/sampling/test_overlap_law.py).

The picked id must not depend on the device. So the integer bits are Philox's, and `fixed_log` is a fixed sequence of
IEEE operations, since libraries' logarithms differ in their last bits. `coupled_ids` picks in torch, for a batch of
rows on any device, without a wait; `coupled_id` picks the same ids row by row on the host, with logarithms of the few
ids that may win; `host_sampling.py` states how much time that saves.
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
from outrider.engine.sampling.noise import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS, WORD, NoiseStream
from outrider.engine.sampling.token_distribution import Array, EmptyDistribution, Ids, TokenDistribution, Weights
from outrider.wire.requests.params import SamplingParams

MAX_NUMBERS = 1 << 23
"""Maximum count of Gumbel numbers that are computed at once on a device. A dozen arrays of 8 bytes per number are live
at a time: 0.8 GB."""
_ROUNDING = 1.0 + 1e-9
"""Factor by which a bound is widened, above all its rounding errors. The same as in noise.h."""
LN2 = math.log(2.0)
ROOT_HALF = math.sqrt(0.5)
LOG_TERMS = tuple(1.0 / (2 * k + 1) for k in range(11, 0, -1))
"""Coefficients of the power series of artanh(t), from the highest power to the lowest. The remainder is below 2^-54 for
|t| <= 0.1716."""


def coupled_id(distribution: TokenDistribution, params: SamplingParams, position: int) -> int:
    """Return the id with the largest log-prob + Gumbel number, the lowest among equals. An id's Gumbel number follows
    from the request's seed and from `position` in its sequence, so that the draft worker and the target have the same.
    Raises EmptyDistribution if no id has positive finite mass.
    """
    return distribution.id_of(
        _place(distribution.weights, distribution.ids, params, position, lambda places: distribution.scores[places])
    )


def coupled_index(weights: Weights, ids: Ids | None, params: SamplingParams, position: int) -> int:
    """Return the index of the weight with the largest log(weight) + Gumbel number. The Gumbel numbers follow from the
    request's seed, from `position` in its sequence and from the ids. Raises EmptyDistribution if no
    weight is positive and finite.

    weights: probabilities up to a factor, [N] float64. ids: token ids of the weights, [N]; None for 0 .. N - 1.
    """
    return _place(weights, ids, params, position, lambda places: np.log(weights[places]))


def _place(
    weights: Weights, ids: Ids | None, params: SamplingParams, position: int, logs: Callable[[Ids], Array]
) -> int:
    # logs: returns the logarithms of the weights at some places, to which the Gumbel numbers are added
    places = _may_win(weights, ids, params, position)  # [M]
    if places.size == 1:
        return int(places[0])
    token_ids = places
    if ids is not None:
        token_ids = ids[places]
    u = uniforms(params, position, token_ids)
    return int(places[(logs(places) + gumbels_of(u)).argmax()])


def coupled_ranked(
    distribution: TokenDistribution, params: SamplingParams, position: int, num: int
) -> tuple[list[int], list[float]]:
    """Return the `num` ids that the target most likely picks at `position`, best first, and the probability of each.
    The target's own distribution is not known yet; it is taken to be close to `distribution`. The Gumbel numbers with
    which it picks are known. Raises EmptyDistribution if no id has positive finite mass.

    The probability of an id is exp(log-prob + Gumbel number), divided by the sum of this over all ids. There are fewer
    ids if the distribution has fewer.
    """
    ids: Ids | int = distribution.scores.size
    if distribution.ids is not None:
        ids = distribution.ids
    u = uniforms(params, position, ids)  # [N]
    weights = np.exp(distribution.scores, dtype=np.float64) / -np.log(u)  # [N], exp(score + Gumbel) up to rounding
    total = float(weights.sum())
    if not 0.0 < total < math.inf:
        raise EmptyDistribution(f"nothing to draw from: the row sums to {total}")
    places = np.flatnonzero(weights)
    if places.size > num:
        places = places[np.argpartition(weights[places], places.size - num)[-num:]]
    places = places[np.argsort(-weights[places])]
    return [distribution.id_of(int(place)) for place in places], (weights[places] / total).tolist()


def _may_win(weights: Weights, ids: Ids | None, params: SamplingParams, position: int) -> Ids:
    """Return indices [M], ascending, one of which has the largest log(weight) + Gumbel; only these need logarithms.

    The winner has the least E / weight, E = -log(u). As 1 - u <= E <= (1 - u) / u, no place wins whose (1 - u) / weight
    is above another's (1 - u) / u / weight. Weights are finite, for a distribution and its residuals have none far
    above 1. Raises EmptyDistribution.
    """
    native = loaded()
    weights = np.ascontiguousarray(weights, dtype=np.float64)
    if native is None:
        u = uniforms(params, position, weights.size if ids is None else ids)  # [N]
        with np.errstate(divide="ignore", invalid="ignore"):
            lower_bounds = (1.0 - u) / weights  # [N]; inf without weight
        upper_bound = np.fmin.reduce(lower_bounds / u, initial=math.inf)
        places = np.flatnonzero((lower_bounds <= upper_bound * _ROUNDING) & (lower_bounds < math.inf))
    else:
        places = np.empty(weights.size, dtype=np.int64)
        ids_at = None
        if ids is not None:
            ids_at = ids.ctypes.data
        arrays = (ids_at, weights.size, weights.ctypes.data, places.ctypes.data)
        places = places[: native.outrider_may_win(params.seed, position, _purpose(params), *arrays)]
    if not places.size:
        raise EmptyDistribution("nothing to draw from: the row has no positive finite mass")
    return places


def uniforms(params: SamplingParams, position: int, ids: Ids | int) -> Weights:
    """Return the uniform numbers of a request at a position, one for each of the ids [N] int64, or for ids 0 .. ids - 1
    if `ids` is a number: [N] float64 in (0, 1), 53 bits each.

    An even id and the odd one after it share a Philox counter, (id // 2, position, purpose + 256 * choice, 0), where
    choice is the index of the output among the request's `n`. The even id has its first two words, the odd one the
    other two.
    """
    native = loaded()
    if native is None:
        every = np.arange(ids) if isinstance(ids, int) else ids  # [N]
        pairs = _pairs(torch.tensor([_key(params, position)]), torch.from_numpy(every >> 1))[0].numpy()  # [N, 2]
        return pairs[np.arange(every.size), every & 1]  # type: ignore[no-any-return]
    if isinstance(ids, int):
        ids_at = None
        out = np.empty(ids)
    else:
        ids_at = ids.ctypes.data
        out = np.empty(ids.size)
    native.outrider_id_uniforms(params.seed, position, _purpose(params), ids_at, out.size, out.ctypes.data)
    return out


def _purpose(params: SamplingParams) -> int:
    return params.choice << 8 | NoiseStream.TARGET


def _key(params: SamplingParams, position: int) -> tuple[int, int, int, int]:
    # low and high word of the seed, purpose word, position
    return params.seed & WORD, params.seed >> 32, _purpose(params), position


def gumbels_of(u: Array) -> Array:
    """Return -log(-log(u)) with the same bits on every device. u: float64 in (0, 1), of NumPy or torch."""
    return -fixed_log(-fixed_log(u))


def fixed_log(x: Array) -> Array:
    """Return the natural logarithm of positive normal doubles, of NumPy or torch, to a few units in the last place.

    It uses only additions, multiplications and divisions, none of which may be fused into a multiply-add: log(m 2^e) =
    2 artanh((m - 1) / (m + 1)) + e log 2 with m in [sqrt(1/2), sqrt(2)).
    """
    lib: Any = np
    if isinstance(x, Tensor):
        lib = torch
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
    """Return for each row the id with the largest log-prob + Gumbel number, the lowest among equals: [R, V] float32 ->
    [R] int64.

    params, positions: parameters of the row's request and position of the row, [R], from which its Gumbel numbers
    follow. For a row without a finite log-prob the id is meaningless; check for such rows before.
    """
    return pick(log_probs, device_keys(params, positions, log_probs.device))


def device_keys(params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys of the random numbers at R positions, [R, 4] int64: low word of the seed, high word of the seed,
    purpose + 256 * choice (index of the output among the request's `n`), position.
    """
    keys = list[tuple[int, int, int, int]]()
    for own, position in zip(params, positions, strict=True):
        keys.append(_key(own, position))
    return to_device(np.array(keys, dtype=np.int64), device)


def pick(log_weights: Tensor, keys: Tensor) -> Tensor:
    """Return for each row the id with the largest log-weight + Gumbel number, the lowest among equals: log-weights [R,
    V] -> [R] int64. keys: of the rows' Gumbel numbers, from `device_keys`, [R, 4].
    """
    num_rows, vocab_size = log_weights.shape
    step = max(1, MAX_NUMBERS // vocab_size)  # rows at once
    parts = list[Tensor]()
    for first in range(0, num_rows, step):
        noise = gumbels(keys[first : first + step], vocab_size)  # [step, V] float64
        parts.append((log_weights[first : first + step].double() + noise).argmax(dim=1))  # [step]
    return torch.cat(parts)


def gumbels(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the Gumbel numbers of ids 0 .. V - 1 at R positions, [R, V] float64. keys: from `device_keys`, [R, 4]."""
    counters = torch.arange((vocab_size + 1) // 2, device=keys.device)  # [ceil(V / 2)]
    return gumbels_of(_pairs(keys, counters).flatten(1)[:, :vocab_size])


def _pairs(keys: Tensor, counters: Tensor) -> Tensor:
    # keys [R, 4], counters [N] int64 (ids // 2) -> [R, N, 2] float64 in (0, 1): of the even id and of the odd one
    low, high, purpose, position = keys[:, :, None].unbind(1)  # [R, 1] each
    words = _philox4x32((counters[None], position, purpose, torch.zeros_like(position)), low, high)  # [R, N] each
    even = words[0] << 21 | words[1] >> 11
    odd = words[2] << 21 | words[3] >> 11
    return torch.stack((even, odd), dim=2).double().clamp_min(0.5) * 2.0**-53


def _philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], low: Tensor, high: Tensor) -> list[Tensor]:
    # int64 tensors below 2^32 that broadcast; a product wraps into the sign, and its bits are the same
    c0, c1, c2, c3 = counter
    for _ in range(NUM_ROUNDS):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (odd >> 32 & WORD) ^ c1 ^ low, odd & WORD
        c2, c3 = (even >> 32 & WORD) ^ c3 ^ high, even & WORD
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))
