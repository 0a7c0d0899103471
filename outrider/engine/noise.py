"""Random numbers as a function of where they are used: counter-based, so that no generator carries state.

A draw is keyed by the request's seed and counted by (choice, position, purpose, candidate): a retry, another batch or
another device gives the same number. Used by the proposer (DRAFT) and the verifier (ACCEPT, RECOVER, TARGET).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

# Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF


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
