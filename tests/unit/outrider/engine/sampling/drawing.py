"""The device's inverse CDF for tests, where a row without mass is a mistake."""

import torch
from torch import Tensor

from outrider.engine.sampling.device_sampling import cut, inverse_cdf


def draw(log_probs: Tensor, u: Tensor) -> Tensor:
    """log_probs [R, V] float32, u [R] float64 in (0, 1) -> [R] int64."""
    return draw_weights(log_probs.double().exp(), u)


def draw_weights(weights: Tensor, u: Tensor) -> Tensor:
    """weights [R, V] float64 >= 0 that need not sum to 1."""
    ids, sound = inverse_cdf(weights, u)
    assert bool(sound.all())
    return ids


def cut_dense(log_probs: Tensor, n: int) -> Tensor:
    """`cut` as whole rows [R, V] float32, -inf outside what is kept."""
    laws = cut(log_probs, n)
    if not laws.ids.shape[1]:
        return laws.scores
    return torch.full_like(log_probs, -torch.inf).scatter_(1, laws.ids.long(), laws.scores)
