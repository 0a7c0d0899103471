"""From processed logits to laws, and from a law and a uniform number to a token: for a batch of rows, on any device.

The host waits for nothing here. Logits on a CPU go row by row through `host_sampling.py`, which means the same and says
what that saves.

Order: (`penalties.process_unchecked`), temperature, top-k, top-p, min-p, as in transformers' processors.
vLLM applies min-p before top-k and top-p, so that its top-p sees the mass that min-p left.

Everything that decides a draw is a function of the float32 log-probs that `distributions` returns: they are what the
draft ships, so the target knows to the bit the law that a draft token was drawn from.
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
from outrider.engine.sampling.row_law import COLDEST, RowLaw
from outrider.wire.requests.params import SamplingParams

_HALF = 16
"""Bits of a float32 that one histogram leaves to the next."""
_INF_BITS = 0x7F800000
"""Bits of a float32 infinity."""


def distributions(processed: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """Return the law that each row's token is drawn from: [R, V] float32 -> [R, V] float32 log-probs, -inf for no mass.

    top_k keeps all that tie with the k-th best. top_p keeps the smallest set of at least that mass; among equals at
    its edge the lowest ids. min_p keeps what has at least min_p times the largest probability. Each acts on what the
    one before it left, renormalised. Temperature 0 is all mass on `argmax`. A row depends on no other row.
    """
    params = [row.state.params for row in rows]
    best = processed.amax(dim=1, keepdim=True)  # [R, 1]
    scaled = processed - best  # [R, V], largest 0
    if any(p.temperature != 1.0 for p in params):
        scaled /= _column([max(p.temperature, COLDEST) for p in params], scaled)
    _keep_top_k(scaled, processed, params)
    _keep_top_p(scaled, params)
    _keep_min_p(scaled, params)
    _keep_best(scaled, processed, params)
    return scaled.log_softmax(dim=1)


def argmax(processed: Tensor) -> Tensor:
    """Return the best id of each row, the lowest among equals on every device: [R, V] float32 -> [R] int64."""
    return processed.argmax(dim=1)


def probabilities(log_probs: Tensor) -> Tensor:
    """Return the law of a draw: [..., V] float32 log-probs -> [..., V] float64, each row divided by its own sum."""
    weights = log_probs.double().exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def inverse_cdf(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw an id of each row: weights [R, V] float64 >= 0 that need not sum to 1, u [R] float64 in (0, 1) -> ids [R]
    int64 of positive weight, and whether the row's sum is positive and finite [R] bool: else the id means nothing.
    """
    cdf = weights.cumsum(dim=1)  # [R, V] float64
    total = cdf[:, -1]
    has_mass = weights > 0
    reached = has_mass & (cdf > (u * total)[:, None])  # a parallel scan may round its sum upwards over a zero
    first = reached.byte().argmax(dim=1)
    last = weights.shape[1] - 1 - has_mass.flip(1).byte().argmax(dim=1)  # it may also end below u * total
    return torch.where(reached.any(dim=1), first, last), (total > 0) & total.isfinite()


class Laws(NamedTuple):
    """Laws that a draft draws from and sends: whole rows, or the entries that a cut kept."""

    scores: Tensor
    """[R, N] float32 log-probs, -inf for no mass."""
    ids: Tensor
    """[R, N] int32, ascending; [R, 0] where entry i is id i and N = V."""

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw an id of each row, as `inverse_cdf` does: u [R] float64 in (0, 1) -> [R] int64, [R] bool."""
        places, has_mass = inverse_cdf(self.scores.double().exp(), u)
        if self.ids.shape[1]:
            places = self.ids.gather(1, places[:, None])[:, 0].long()
        return places, has_mass

    def rows(self, vocab_size: int) -> list[RowLaw]:
        """Return the laws one by one. On the host."""
        scores, ids = self.scores.numpy(), self.ids.long().numpy()
        return [RowLaw(vocab_size, row, own if own.size else None) for row, own in zip(scores, ids, strict=True)]


def cut(log_probs: Tensor, n: int | None) -> Laws:
    """Return the n most likely entries of each row [R, V] float32, renormalised; the rows themselves where n is None or
    not below V. n must be at least 1.
    """
    if n is None or n >= log_probs.shape[1]:
        return Laws(log_probs, log_probs.new_empty((len(log_probs), 0), dtype=torch.int32))
    ids = log_probs.topk(n, dim=1).indices.sort(dim=1).values  # [R, n]
    kept = log_probs.gather(1, ids)
    return Laws(kept.double().log_softmax(dim=1).float(), ids.int())


def _keep_top_k(scaled: Tensor, processed: Tensor, params: list[SamplingParams]) -> None:
    """Cut in place. The threshold comes from the logits themselves: scaling could make near values equal."""
    vocab_size = scaled.shape[1]
    counts = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    widest = max(counts)
    if widest == 0:
        return
    best = processed.topk(widest, dim=1).values  # [R, k]
    edge = best.gather(1, _column([max(n - 1, 0) for n in counts], scaled, torch.int64))  # [R, 1]
    limited = _column([n > 0 for n in counts], scaled, torch.bool)
    scaled.masked_fill_((processed < edge) & limited, -torch.inf)


def _keep_top_p(scaled: Tensor, params: list[SamplingParams]) -> None:
    """Cut in place. A token stays while the mass of the more likely ones is below top_p."""
    chosen = [r for r, p in enumerate(params) if p.top_p < 1.0 and not p.greedy]
    step = max(1, MAX_NUMBERS // max(scaled.shape[1], 1 << _HALF))  # rows at once: each takes a dozen arrays
    for start in range(0, len(chosen), step):
        _cut_top_p(scaled, params, chosen[start : start + step])


def _cut_top_p(scaled: Tensor, params: list[SamplingParams], chosen: list[int]) -> None:
    """Cut the chosen rows in place."""
    index = to_device(np.array(chosen), scaled.device)
    x = scaled[index]  # [r, V]
    top_p = _column([params[r].top_p for r in chosen], x, torch.float64)  # [r, 1]
    cut, num_equal = _nucleus_edge(x, top_p)
    equal = x == cut
    keep = (x > cut) | (equal & (equal.cumsum(dim=1) <= num_equal))
    scaled[index] = x.masked_fill_(~keep, -torch.inf)


def _nucleus_edge(x: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the smallest set of mass top_p ends. x [r, V] float32 with a largest value of 0; top_p [r, 1] float64.

    Returns the smallest value in the set [r, 1] and how many tokens of that value are in it [r, 1]. Nothing is sorted:
    the bits of a positive float, read as an integer, are in the order of the floats, so that a histogram over the upper
    half of them says in which bin the mass is reached, and one over the lower half, of that bin alone, at which value.
    A GPU adds in no fixed order: where a sum meets top_p to the last bit, that decides about one token at the edge.
    """
    bits = x.abs().view(torch.int32)
    weights = x.double().exp()
    wanted = weights.sum(dim=1, keepdim=True) * top_p
    upper, above = _reaching(bits >> _HALF, weights, 1 << (31 - _HALF), wanted)
    wanted -= above
    inner = torch.where(bits >> _HALF == upper, weights, 0.0)
    lower, above = _reaching(bits & ((1 << _HALF) - 1), inner, 1 << _HALF, wanted)
    edge = (upper << _HALF | lower).clamp_max(_INF_BITS)  # beyond: rounding left the mass just short of `wanted`
    cut = -edge.int().view(torch.float32)
    return cut, ((wanted - above) / cut.double().exp()).ceil().clamp_min(1.0)


def _reaching(places: Tensor, weights: Tensor, num_places: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place [r, 1] with which the sum of weights [r, V] at places [r, V] reaches wanted [r, 1] > 0, or
    the last one when none does, and the sum before it [r, 1].
    """
    anywhere = torch.arange(weights.shape[1], device=weights.device) % num_places  # [V]
    places = torch.where(weights > 0, places, anywhere)  # of what top-k cut: a GPU adds to one place one by one
    sums = weights.new_zeros((len(weights), num_places)).scatter_add_(1, places, weights).cumsum(dim=1)
    reaching = (sums < wanted).sum(dim=1, keepdim=True).clamp_max(num_places - 1)
    return reaching, torch.where(reaching > 0, sums.gather(1, (reaching - 1).clamp_min(0)), 0.0)


def _keep_min_p(scaled: Tensor, params: list[SamplingParams]) -> None:
    """Cut in place. The best token is at 0 whatever was cut before, so the bound is log(min_p)."""
    if any(p.min_p > 0.0 for p in params):
        bound = _column([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params], scaled)
        scaled.masked_fill_(scaled < bound, -torch.inf)


def _keep_best(scaled: Tensor, processed: Tensor, params: list[SamplingParams]) -> None:
    """Leave only the best token of greedy rows, in place."""
    if any(p.greedy for p in params):
        greedy = _column([p.greedy for p in params], scaled, torch.bool)
        best = torch.full_like(scaled, -torch.inf).scatter_(1, argmax(processed)[:, None], 0.0)
        scaled.copy_(torch.where(greedy, best, scaled))


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values [R] as [R, 1] on the device of `like`."""
    kinds = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}
    return to_device(np.array(values, dtype=kinds[dtype or like.dtype]), like.device)[:, None]
