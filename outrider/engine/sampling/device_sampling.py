"""From processed logits to distributions, and from a distribution and a uniform number to a token, for a batch of rows.

It runs on any device, and the host waits for nothing. `host_sampling.py` does the same row by row for logits on a CPU.
Order: (`penalties.process_unchecked`), temperature, top-k, top-p, min-p, as in transformers' processors. vLLM applies
min-p before top-k and top-p, so that its top-p counts only the mass that min-p left.

A draw depends on the float32 log-probs that `distributions` returns and on nothing else. A draft worker sends these, so
that the target has the distribution of a draft token to the bit. R rows, V ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.coupled import MAX_NUMBERS
from outrider.engine.sampling.penalties import LogitRow
from outrider.engine.sampling.token_distribution import COLDEST, TokenDistribution
from outrider.wire.requests.params import SamplingParams

_HALF = 16
"""Number of low bits of a float32 over which the second histogram is made. The first is made over the high bits."""
_INF_BITS = 0x7F800000
"""Bit pattern of float32 infinity."""


def distributions(processed: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """Return the distribution from which each row's token is drawn: logits [R, V] float32 -> log-probs [R, V] float32,
    -inf for no mass. Applies temperature, top_k, top_p and min_p, in this order.

    processed: logits after penalties, biases and masks (`process_unchecked`). rows: request and position of each row,
    [R]. top_k keeps all ids that tie with the k-th best. top_p keeps the smallest set of at least that mass, and among
    equals at its edge the lowest ids. min_p keeps the ids with at least min_p times the largest probability. Each cut
    acts on the result of the previous one, renormalised. Temperature 0 puts all mass on the best id, the lowest among
    equals. A row depends on no other row.
    """
    params = [row.state.params for row in rows]
    best = processed.amax(dim=1, keepdim=True)  # [R, 1]
    scaled = processed - best  # [R, V], the largest 0
    temperatures = [own.temperature for own in params]
    if temperatures.count(1.0) != len(temperatures):
        scaled /= _column([max(temperature, COLDEST) for temperature in temperatures], scaled)
    _keep_top_k(scaled, processed, params)
    _keep_top_p(scaled, params)
    _keep_min_p(scaled, params)
    _keep_best(scaled, processed, params)
    return scaled.log_softmax(dim=1)


def argmax(processed: Tensor) -> Tensor:
    """Return the best id of each row, the lowest among equals on every device: [R, V] float32 -> [R] int64."""
    return processed.argmax(dim=1)


def probabilities(log_probs: Tensor) -> Tensor:
    """Return probabilities from log-probs, each row divided by its sum: [..., V] float32 -> [..., V] float64."""
    weights = log_probs.double().exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def inverse_cdf(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one id per row by the inverse CDF: weights [R, V] float64 >= 0, u [R] float64 in (0, 1) -> ids [R] int64,
    has_mass [R] bool.

    Weights need not sum to 1, and drawn ids have positive weight. has_mass is whether the sum of a row's weights is
    positive and finite. If it is not, the row's id is meaningless.
    """
    cdf = weights.cumsum(dim=1)  # [R, V] float64
    total = cdf[:, -1]  # [R]
    has_mass = weights > 0  # [R, V]
    reached = has_mass & (cdf > (u * total)[:, None])  # [R, V]; a parallel scan may round its sum up over a zero
    first = reached.byte().argmax(dim=1)  # [R]
    last = weights.shape[1] - 1 - has_mass.flip(1).byte().argmax(dim=1)  # [R]; the scan may end below u * total
    return torch.where(reached.any(dim=1), first, last), (total > 0) & total.isfinite()


class DraftDistributions(NamedTuple):
    """R distributions from which a draft worker draws, and which it sends to the target. Each has an entry for every id
    of the vocabulary or, if `cut` has shortened it, for its N likeliest ids.
    """

    scores: Tensor
    """Log-probs of the entries, -inf for no mass, [R, N] float32."""
    ids: Tensor
    """Token ids of the entries, ascending, [R, N] int32; [R, 0] for whole rows, where entry i is id i and N = V."""

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one id per row by the inverse CDF: u [R] float64 in (0, 1) -> ids [R] int64, has_mass [R] bool. A row
        without positive finite mass has a meaningless id.
        """
        places, has_mass = inverse_cdf(self.scores.double().exp(), u)
        if self.ids.shape[1]:
            places = self.ids.gather(1, places[:, None])[:, 0].long()
        return places, has_mass

    def rows(self, vocab_size: int) -> list[TokenDistribution]:
        """Return the R distributions as objects on the host. The tensors must be on the host."""
        found = list[TokenDistribution]()
        for scores, ids in zip(self.scores.numpy(), self.ids.long().numpy(), strict=True):  # [N], [N] or [0]
            if ids.size:
                found.append(TokenDistribution(vocab_size, scores, ids))
            else:
                found.append(TokenDistribution(vocab_size, scores))
        return found


def cut(log_probs: Tensor, n: int | None) -> DraftDistributions:
    """Return the n most likely entries of each row of log-probs [R, V] float32, renormalised.

    n: at least 1. If it is None, or V or more, the rows stay whole.
    """
    if n is None or n >= log_probs.shape[1]:
        return DraftDistributions(log_probs, log_probs.new_empty((len(log_probs), 0), dtype=torch.int32))
    ids = log_probs.topk(n, dim=1).indices.sort(dim=1).values  # [R, n]
    kept = log_probs.gather(1, ids)  # [R, n]
    return DraftDistributions(kept.double().log_softmax(dim=1).float(), ids.int())


def _keep_top_k(scaled: Tensor, processed: Tensor, params: list[SamplingParams]) -> None:
    # The threshold is one of the unscaled logits, since scaling could make near values equal.
    vocab_size = scaled.shape[1]
    max_k = 0
    last_places = list[int]()  # of the k-th best, where a row has top-k
    is_limited = list[bool]()
    for own in params:
        has_top_k = 0 < own.top_k < vocab_size
        is_limited.append(has_top_k)
        last_places.append(own.top_k - 1 if has_top_k else 0)
        if has_top_k:
            max_k = max(max_k, own.top_k)
    if max_k == 0:
        return
    best = processed.topk(max_k, dim=1).values  # [R, max_k]
    edge = best.gather(1, _column(last_places, scaled, torch.int64))  # [R, 1]
    scaled.masked_fill_((processed < edge) & _column(is_limited, scaled, torch.bool), -torch.inf)


def _keep_top_p(scaled: Tensor, params: list[SamplingParams]) -> None:
    # A token stays while the mass of the more likely ones is below top_p.
    chosen = list[int]()
    for r, own in enumerate(params):
        if own.top_p < 1.0 and not own.greedy:
            chosen.append(r)
    step = max(1, MAX_NUMBERS // max(scaled.shape[1], 1 << _HALF))  # rows at once, of a dozen arrays each
    for start in range(0, len(chosen), step):
        _cut_top_p(scaled, params, chosen[start : start + step])


def _cut_top_p(scaled: Tensor, params: list[SamplingParams], chosen: list[int]) -> None:
    index = to_device(np.array(chosen), scaled.device)
    x = scaled[index]  # [r, V]
    top_p = _column([params[r].top_p for r in chosen], x, torch.float64)  # [r, 1]
    edge, num_equal = _nucleus_edge(x, top_p)  # [r, 1] each
    equal = x == edge  # [r, V]
    keep = (x > edge) | (equal & (equal.cumsum(dim=1) <= num_equal))  # [r, V]
    scaled[index] = x.masked_fill_(~keep, -torch.inf)


def _nucleus_edge(x: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per row, the smallest value in the smallest set of mass top_p, and the number of tokens of that value in
    the set.

    x: [r, V] float32, the largest value of a row 0; top_p: [r, 1] float64; both results are [r, 1]. Nothing is sorted:
    the bits of positive floats, read as integers, have the order of the floats. So a histogram over their upper half
    has the bin in which the mass is reached, and one over the lower half, of that bin alone, has the value. A GPU adds
    in no fixed order: where a sum meets top_p to the last bit, one token at the edge may differ.
    """
    bits = x.abs().view(torch.int32)  # [r, V]
    weights = x.double().exp()  # [r, V]
    min_mass = weights.sum(dim=1, keepdim=True) * top_p  # [r, 1]
    upper, above = _reaching(bits >> _HALF, weights, 1 << (31 - _HALF), min_mass)  # [r, 1] each
    min_mass -= above
    inner = torch.where(bits >> _HALF == upper, weights, 0.0)  # [r, V]
    lower, above = _reaching(bits & ((1 << _HALF) - 1), inner, 1 << _HALF, min_mass)  # [r, 1] each
    edge_bits = (upper << _HALF | lower).clamp_max(_INF_BITS)  # beyond: rounding left the mass just short of min_mass
    edge = -edge_bits.int().view(torch.float32)  # [r, 1]
    return edge, ((min_mass - above) / edge.double().exp()).ceil().clamp_min(1.0)


def _reaching(places: Tensor, weights: Tensor, num_places: int, min_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place at which the sum of the weights up to it reaches min_mass, or the last one, and the sum
    before it. places, weights: [r, V]; min_mass > 0 and both results: [r, 1].
    """
    anywhere = torch.arange(weights.shape[1], device=weights.device) % num_places  # [V]
    places = torch.where(weights > 0, places, anywhere)  # spread weight 0: a GPU adds to one place one by one
    sums = weights.new_zeros((len(weights), num_places)).scatter_add_(1, places, weights).cumsum(dim=1)  # [r, places]
    reaching = (sums < min_mass).sum(dim=1, keepdim=True).clamp_max(num_places - 1)  # [r, 1]
    return reaching, torch.where(reaching > 0, sums.gather(1, (reaching - 1).clamp_min(0)), 0.0)


def _keep_min_p(scaled: Tensor, params: list[SamplingParams]) -> None:
    # The best token is at 0 whatever was cut before, so the bound is log(min_p).
    bounds = list[float]()
    has_bound = False
    for own in params:
        if own.min_p > 0.0:
            bounds.append(math.log(own.min_p))
            has_bound = True
        else:
            bounds.append(-math.inf)
    if has_bound:
        scaled.masked_fill_(scaled < _column(bounds, scaled), -torch.inf)


def _keep_best(scaled: Tensor, processed: Tensor, params: list[SamplingParams]) -> None:
    # of greedy rows alone
    is_greedy = [own.greedy for own in params]
    if any(is_greedy):
        greedy = _column(is_greedy, scaled, torch.bool)  # [R, 1]
        best = torch.full_like(scaled, -torch.inf).scatter_(1, argmax(processed)[:, None], 0.0)  # [R, V]
        scaled.copy_(torch.where(greedy, best, scaled))


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    # [R] -> [R, 1] on the device of `like`
    kinds = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}
    return to_device(np.array(values, dtype=kinds[dtype or like.dtype]), like.device)[:, None]
