"""The device's inverse CDF for tests, where a row without mass is a mistake."""

from __future__ import annotations

from torch import Tensor

from outrider.engine.sampling import inverse_cdf


def draw(log_probs: Tensor, u: Tensor) -> Tensor:
    """log_probs [R, V] float32, u [R] float64 in (0, 1) -> [R] int64."""
    return draw_weights(log_probs.double().exp(), u)


def draw_weights(weights: Tensor, u: Tensor) -> Tensor:
    """weights [R, V] float64 >= 0 that need not sum to 1."""
    ids, sound = inverse_cdf(weights, u)
    assert bool(sound.all())
    return ids
