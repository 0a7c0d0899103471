"""The formulas of Leviathan, Kalman and Matias (2023), "Fast inference from transformers via speculative decoding".

For `outrider tune` and `make papers`. alpha is the probability that a draft token is accepted, which is taken to be the
same at each position. k is the number of draft tokens per round, which the paper calls gamma.
"""

from __future__ import annotations


def expected_tokens(alpha: float, k: int) -> float:
    """Return the mean number of output tokens of a round with `k` draft tokens, each accepted with probability `alpha`
    (Leviathan et al. 2023, equation 1).
    """
    if alpha == 1.0:
        return k + 1.0
    return (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def improvement(alpha: float, k: int, c: float) -> float:
    """Return the speed with `k` draft tokens per round relative to plain decoding (Leviathan et al. 2023, Theorem 3.8).

    alpha: probability that a draft token is accepted. c: time of a draft token divided by the time of a target step.
    The theorem assumes that a step with k + 1 tokens takes as long as one with a single token.
    """
    return expected_tokens(alpha, k) / (k * c + 1.0)


def operations(alpha: float, k: int, c: float) -> float:
    """Return the number of arithmetic operations with `k` draft tokens per round, relative to plain decoding (Leviathan
    et al. 2023, Theorem 3.11).

    alpha: probability that a draft token is accepted. c: the draft's operations per token divided by the target's,
    which the paper writes as c with a hat.
    """
    return (k * c + k + 1.0) / expected_tokens(alpha, k)


def best_k(alpha: float, c: float, max_k: int) -> int:
    """Return the k from 0 to `max_k` with the largest `improvement`, the speed relative to plain decoding. If several
    are equally good, return the smallest.

    alpha: probability that a draft token is accepted. c: time of a draft token divided by the time of a target step.
    """
    return max(range(max_k + 1), key=lambda k: (improvement(alpha, k, c), -k))
