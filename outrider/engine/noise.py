"""Random numbers as a function of where they are used: counter-based, so that no generator carries state.

A draw is keyed by the request's seed and counted by (choice, position, purpose, candidate): a retry, another batch or
another device gives the same number. Used by the proposer (DRAFT) and the verifier (ACCEPT, RECOVER, TARGET). NumPy
makes the few numbers of a step on the host; the tensors' version is for what stays on a device. Their bits are equal.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF
_WORD64 = np.uint64(_WORD)
_SHIFT64 = np.uint64(32)
_MULTIPLIERS64 = np.array(_MULTIPLIERS, dtype=np.uint64)
_KEY_OFFSETS64 = np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None] * np.array(_KEY_STEPS, dtype=np.uint64)  # [10, 2]


class Purpose(IntEnum):
    """What a number is for. Each purpose is an independent stream (DESIGN 3.7): sharing one would bias the output."""

    DRAFT = 1
    """Drawing a draft token."""
    ACCEPT = 2
    """Keeping or rejecting it."""
    RECOVER = 3
    """Drawing the token that replaces it."""
    TARGET = 4
    """Drawing a bonus or a plain token."""


def uniforms(
    seeds: Tensor, choices: Tensor, positions: Tensor, purpose: Purpose | Tensor, candidates: Tensor | None = None
) -> Tensor:
    """Uniform numbers in the open interval (0, 1), 53 bits each -> [N] float64, on the device of `seeds`.

    seeds [N] int64: the 64 bits in two's complement. choices [N] int64 in [0, 2^24).
    positions [N] int64: index of the token in the sequence, [0, 2^32). purpose: one for all, or [N] int64.
    candidates [N] int64: number of a candidate at that position, [0, 2^32); absent = 0.
    The key is the seed, the counter is (candidate, position, purpose + 256 choice, 0).

    Integer operations and one exact scaling: the same bits on every device.
    """
    if candidates is None:
        candidates = torch.zeros_like(positions)
    purposes = choices << 8 | purpose
    words = philox4x32((candidates, positions, purposes, torch.zeros_like(positions)), (seeds, seeds >> 32))
    bits = words[0] << 21 | words[1] >> 11  # [N] int64 in [0, 2^53)
    # Exact: 53 bits fit a double. 0 becomes 2^-54, so that 0 < u < 1 and a probability of 0 or 1 is always honoured.
    return bits.to(torch.float64).clamp_min(0.5) * 2.0**-53


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 over int64 tensors of one shape; only the low 32 bits of each word count.

    Returns four words in [0, 2^32). Products wrap modulo 2^64, which two's complement int64 does on every device.
    """
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = (word & _WORD for word in key)
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product."""
    product = word * multiplier
    return product >> 32 & _WORD, product & _WORD  # the mask undoes the sign that >> smears


def host_uniforms(
    seeds: NDArray[np.uint64],
    choices: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    purposes: NDArray[np.uint64] | Purpose,
) -> NDArray[np.float64]:
    """`uniforms` without candidates in NumPy, bit for bit: all [N] uint64 -> [N] float64 in (0, 1)."""
    counter = np.zeros((4, seeds.size), dtype=np.uint64)
    counter[1] = positions
    counter[2] = choices << np.uint64(8) | np.uint64(purposes)
    key = np.stack((seeds & _WORD64, seeds >> _SHIFT64))  # [2, N]
    words = host_philox4x32(counter, key)
    bits = words[0] << np.uint64(21) | words[1] >> np.uint64(11)
    return np.maximum(bits.astype(np.float64), 0.5) * 2.0**-53


def host_philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`philox4x32` over uint64 arrays: counter [4, N] and key [2, N], each below 2^32 -> [4, N].

    Both halves of a round run as one array of 2 N: what a call costs is the number of its operations. A round leaves
    the halves in the other order, so multipliers and keys take turns.
    """
    num = counter.shape[1]
    multipliers = (np.repeat(_MULTIPLIERS64, num), np.repeat(_MULTIPLIERS64[::-1], num))  # [2 N] each
    keys = np.repeat(_KEY_OFFSETS64, num, axis=1) + key.ravel()  # [10, 2 N]
    keys &= _WORD64
    keys[0::2] = np.roll(keys[0::2], num, axis=1)
    even, odd = counter[0::2].ravel(), counter[1::2]  # words 0 and 2 [2 N], words 1 and 3 [2, N]
    for r in range(_NUM_ROUNDS):
        product = even * multipliers[r & 1]
        even = product >> _SHIFT64
        even ^= odd[::-1].ravel()
        even ^= keys[r]
        product &= _WORD64
        odd = product.reshape(2, num)
    words = np.empty_like(counter)
    words[0::2], words[1::2] = even.reshape(2, num), odd
    return words
