"""Random numbers as a function of where they are used: counter-based, without the state of a generator.

A number is keyed by the request's seed and counted by (choice, position, purpose, round, sample index), so that a
retry, another batch and another device give the same number. Drafters use the purposes DRAFT and OWN_DRAFT, the
target's decision uses ACCEPT, and both use TARGET (`coupled.py`). NumPy makes the few numbers of a step on the host,
whatever device the model is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.native.library import loaded
from outrider.wire.requests.params import SamplingParams

# Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
WORD = 0xFFFFFFFF
FEW = 16
"""Maximum count of random numbers of one call that the native library makes, at 2 us each. NumPy makes any count in
80 us."""
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)
_KEY_OFFSETS = np.arange(NUM_ROUNDS, dtype=np.uint64)[:, None] * np.array(KEY_STEPS, dtype=np.uint64)  # [10, 2]
_WORD = np.uint64(WORD)
_SHIFT = np.uint64(32)


class NoiseStream(IntEnum):
    """Purpose of a random number. Each purpose has its own numbers: one number used twice would bias the output."""

    DRAFT = 1
    """Drawing a draft token in a draft worker."""
    ACCEPT = 2
    """Accepting or rejecting a draft token."""
    OWN_DRAFT = 3
    """Drawing a draft token in the target. With DRAFT it would have the number of a draft worker's draft token that
    the same step may verify."""
    TARGET = 5
    """Drawing the target's own token, with one number per vocabulary id. The numbers are keyed by the position alone,
    so that a draft worker can compute them."""


def host_uniforms(
    seeds: NDArray[np.uint64],
    choices: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    purposes: NDArray[np.uint64] | NoiseStream,
    rounds: NDArray[np.uint64] | int = 0,
    sample_indices: NDArray[np.uint64] | int = 0,
) -> NDArray[np.float64]:
    """Return N uniform numbers in the open interval (0, 1), 53 bits each: all arguments [N] uint64 -> [N] float64.

    The key is the seed, the counter is (round, position, purpose + 256 * choice, sample index). choices: index of the
    output among the request's `n`, in [0, 2^24). positions: index of the token in the sequence, in [0, 2^32). rounds:
    number of committed tokens at which the round began, in [0, 2^32): a position has another number in the next round,
    since block verification also uses numbers of positions after those that it decides. sample_indices: index of the
    draft token among those that are sampled for the position, in [0, 2^32). Purposes, rounds and sample indices may be
    single values for all.
    """
    counter = np.zeros((4, seeds.size), dtype=np.uint64)  # [4, N]
    counter[0] = rounds
    counter[1] = positions
    counter[2] = choices << np.uint64(8) | np.uint64(purposes)
    counter[3] = sample_indices
    key = np.stack((seeds & _WORD, seeds >> _SHIFT))  # [2, N]
    words = host_philox4x32(counter, key)  # [4, N]
    return unit_doubles(words[0], words[1])


def unit_doubles(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in (0, 1) made of 53 bits of two words, each below 2^32: high [N], low [N] -> [N] float64."""
    bits = high << np.uint64(21) | low >> np.uint64(11)
    # Exact: 53 bits fit a double. 0 becomes 2^-54, so that 0 < u < 1 and a probability of 0 or 1 is always honoured.
    return np.maximum(bits.astype(np.float64), 0.5) * 2.0**-53


def host_philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Run ten rounds of Philox4x32 over uint64 arrays: counter [4, N] and key [2, N], each word below 2^32 -> [4, N].

    Both halves of a round run as one array of 2 N, since the number of operations determines the time of a call. A
    round leaves the halves in the other order, so multipliers and keys alternate.
    """
    num = counter.shape[1]
    multipliers = (np.repeat(_MULTIPLIERS, num), np.repeat(_MULTIPLIERS[::-1], num))  # [2 N] each
    keys = np.repeat(_KEY_OFFSETS, num, axis=1) + key.ravel()  # [10, 2 N]
    keys &= _WORD
    keys[0::2] = np.roll(keys[0::2], num, axis=1)
    even, odd = counter[0::2].ravel(), counter[1::2]  # words 0 and 2 [2 N], words 1 and 3 [2, N]
    for r in range(NUM_ROUNDS):
        product = even * multipliers[r & 1]
        even = product >> _SHIFT
        even ^= odd[::-1].ravel()
        even ^= keys[r]
        product &= _WORD
        odd = product.reshape(2, num)
    words = np.empty_like(counter)
    words[0::2], words[1::2] = even.reshape(2, num), odd
    return words


def host_slot_uniforms(
    params: Sequence[SamplingParams],
    rounds: Sequence[int],
    positions: Sequence[int],
    purposes: Sequence[NoiseStream],
    sample_indices: Sequence[int] | None = None,
) -> NDArray[np.float64]:
    """Return a uniform number for each of P purposes and N slots, [P, N] float64 in (0, 1).

    params, positions: request's parameters and token position of each slot, [N]. rounds: number of committed tokens at
    which each slot's round began, [N]. sample_indices: index of the draft token among those that are sampled for the
    position, [N]; None = 0 for all.

    Make one call for all slots: with NumPy it costs the same for any count. If the native library is loaded, it makes
    up to FEW numbers one by one, which is faster.
    """
    count = len(params)
    repeats = len(purposes)
    if sample_indices is None:
        native = None
        if count * repeats <= FEW:
            native = loaded()
        if native is not None:
            return _one_by_one(native, params, rounds, positions, purposes)
        sample_indices = [0] * count
    seeds = [own.seed for own in params]
    choices = [own.choice for own in params]
    columns = np.array([seeds, choices, positions, rounds, sample_indices], dtype=np.uint64)  # [5, N]
    kinds = np.repeat(np.array(purposes, dtype=np.uint64), count)  # [P * N]
    tiled = np.tile(columns, repeats)  # [5, P * N]
    return host_uniforms(tiled[0], tiled[1], tiled[2], kinds, tiled[3], tiled[4]).reshape(repeats, count)


def _one_by_one(
    native: Any,
    params: Sequence[SamplingParams],
    rounds: Sequence[int],
    positions: Sequence[int],
    purposes: Sequence[NoiseStream],
) -> NDArray[np.float64]:
    # The generator of a vocabulary's ids has half of an even id where these numbers have the round.
    numbers = np.empty((len(purposes), len(params)))  # [P, N]
    id_ = np.empty(1, dtype=np.int64)
    address = numbers.ctypes.data
    item_bytes = numbers.itemsize
    for own, round_, position in zip(params, rounds, positions, strict=True):
        id_[0] = 2 * round_
        for row, purpose in enumerate(purposes):
            at = address + item_bytes * row * len(params)
            native.outrider_id_uniforms(own.seed, position, own.choice << 8 | purpose, id_.ctypes.data, 1, at)
        address += item_bytes
    return numbers
