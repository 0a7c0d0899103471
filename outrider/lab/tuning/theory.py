"""The formulas of Leviathan, Kalman and Matias (2023), "Fast inference from transformers via speculative decoding".

For `outrider tune` and `make papers`. alpha is the probability that a draft token is accepted, the same at each
position; k is the number of draft tokens a round, the paper's gamma.
"""

from __future__ import annotations


def expected_tokens(alpha: float, k: int) -> float:
    """Return the mean number of tokens of a round of `k` draft tokens (equation 1)."""
    if alpha == 1.0:
        return k + 1.0
    return (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def improvement(alpha: float, k: int, c: float) -> float:
    """Return the speed over plain decoding (Theorem 3.8).

    c: time of a draft token over that of a target step, which is taken to be as fast with k + 1 tokens as with one.
    """
    return expected_tokens(alpha, k) / (k * c + 1.0)


def operations(alpha: float, k: int, c: float) -> float:
    """Return the arithmetic operations over those of plain decoding (Theorem 3.11).

    c: the draft's operations a token over the target's, in the paper c with a hat.
    """
    return (k * c + k + 1.0) / expected_tokens(alpha, k)


def best_k(alpha: float, c: float, most: int) -> int:
    """Return the k of the largest improvement, 0 to `most` (Figure 3); the smaller of equals."""
    return max(range(most + 1), key=lambda k: (improvement(alpha, k, c), -k))
