"""Random numbers as a function of where they are used: counter-based, so that no generator carries state.

A draw is keyed by the request's seed and counted by (choice, position, purpose, round, candidate): a retry, another
batch or another device gives the same number. Used by whoever draws drafts (DRAFT, OWN_DRAFT), by the verifier (ACCEPT)
and by both (TARGET, in `coupled.py`). NumPy makes the few numbers of a step on the host, whatever device the model is
on.
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
"""Numbers up to which the native library makes them one by one, at 2 us each; NumPy takes 80 us for any number."""
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)
_KEY_OFFSETS = np.arange(NUM_ROUNDS, dtype=np.uint64)[:, None] * np.array(KEY_STEPS, dtype=np.uint64)  # [10, 2]
_WORD = np.uint64(WORD)
_SHIFT = np.uint64(32)


class Purpose(IntEnum):
    """The use of a number. Each is an independent stream: sharing one would bias the output."""

    DRAFT = 1
    """Drawing a draft token."""
    ACCEPT = 2
    """Keeping or rejecting it."""
    OWN_DRAFT = 3
    """Drawing a draft token in the target, in a step where a chain of a draft's may lie that began at its length."""
    TARGET = 5
    """Drawing what the target says itself, by a number for each vocabulary id: keyed by the position alone, so that a
    draft can know what it would pick."""


def host_uniforms(
    seeds: NDArray[np.uint64],
    choices: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    purposes: NDArray[np.uint64] | Purpose,
    rounds: NDArray[np.uint64] | int = 0,
    candidates: NDArray[np.uint64] | int = 0,
) -> NDArray[np.float64]:
    """Return uniform numbers in the open interval (0, 1), 53 bits each. All [N] uint64 -> [N] float64.

    choices in [0, 2^24). positions: index of the token in the sequence, [0, 2^32). purposes: one for all, or [N].
    rounds: committed_len of the round, [0, 2^32), one for all, or [N]: a rule may look at a position and leave it to
    the next round, which then needs numbers that nobody has looked at.
    candidates: which of several drafts for a position, [0, 2^32), one for all, or [N]; 0 for the only one.
    The key is the seed, the counter is (round, position, purpose + 256 choice, candidate).
    """
    counter = np.zeros((4, seeds.size), dtype=np.uint64)
    counter[0] = rounds
    counter[1] = positions
    counter[2] = choices << np.uint64(8) | np.uint64(purposes)
    counter[3] = candidates
    key = np.stack((seeds & _WORD, seeds >> _SHIFT))  # [2, N]
    words = host_philox4x32(counter, key)
    return unit_doubles(words[0], words[1])


def unit_doubles(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return 53 of the bits of two words below 2^32 as a number in (0, 1). [N] each -> [N]."""
    bits = high << np.uint64(21) | low >> np.uint64(11)
    # Exact: 53 bits fit a double. 0 becomes 2^-54, so that 0 < u < 1 and a probability of 0 or 1 is always honoured.
    return np.maximum(bits.astype(np.float64), 0.5) * 2.0**-53


def host_philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Run ten rounds of Philox4x32 over uint64 arrays: counter [4, N] and key [2, N], each below 2^32 -> [4, N].

    Both halves of a round run as one array of 2 N: what a call costs is the number of its operations. A round leaves
    the halves in the other order, so multipliers and keys take turns.
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
    purposes: Sequence[Purpose],
    candidates: Sequence[int] | None = None,
) -> NDArray[np.float64]:
    """Return a uniform per purpose and (params, round, position, candidate): [P, N] in (0, 1). rounds: each's
    committed_len. candidates: 0 for all when None.

    All at once: NumPy's generator costs some 70 small operations a call, however many numbers it makes. A few are made
    one by one where the native library is loaded: of a draft's step of one token that is a tenth.
    """
    count, repeats = len(params), len(purposes)
    native = loaded() if candidates is None and count * repeats <= FEW else None
    if native is not None:
        return _one_by_one(native, params, rounds, positions, purposes)
    which = [0] * count if candidates is None else list(candidates)
    each = [[p.seed for p in params], [p.choice for p in params], list(positions), list(rounds), which]
    kinds = np.repeat(np.array(purposes, dtype=np.uint64), count)
    seeds, choices, at, within, drawn = np.tile(np.array(each, dtype=np.uint64), repeats)
    return host_uniforms(seeds, choices, at, kinds, within, drawn).reshape(repeats, count)


def _one_by_one(
    native: Any,
    params: Sequence[SamplingParams],
    rounds: Sequence[int],
    positions: Sequence[int],
    purposes: Sequence[Purpose],
) -> NDArray[np.float64]:
    """Make the same numbers: the generator of a vocabulary's ids has the round where an even id has its half."""
    found, id_ = np.empty((len(purposes), len(params))), np.empty(1, dtype=np.int64)
    address, item = found.ctypes.data, found.itemsize
    for p, round_, position in zip(params, rounds, positions, strict=True):
        id_[0] = 2 * round_
        for row, purpose in enumerate(purposes):
            at = address + item * row * len(params)
            native.outrider_id_uniforms(p.seed, position, p.choice << 8 | purpose, id_.ctypes.data, 1, at)
        address += item
    return found
