"""From processed logits to a distribution, and from a distribution and a uniform number to a token.

Used by both workers. Order: (`penalties.process`), temperature, top-k, top-p, min-p, as in transformers' processors.
vLLM applies min-p before top-k and top-p, so that its top-p sees the mass that min-p left.

Everything that decides a draw is a function of the float32 log-probs that `distributions` returns: they are what the
draft ships, so the target knows to the bit the law that a draft token was drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.penalties import LogitRow, NonFiniteLogits, SamplingState, process
from outrider.wire.params import SamplingParams

__all__ = [
    "LogitRow",
    "NonFiniteLogits",
    "SamplingState",
    "argmax",
    "distributions",
    "draw",
    "draw_weights",
    "probabilities",
    "process",
    "top_logprobs",
    "truncate_topk",
]

_NUM_CANDIDATES = 1024
"""Top-p looks at this many best tokens first; only rows whose mass lies wider are sorted whole."""
_COLDEST = float(torch.finfo(torch.float32).tiny)
"""Lower temperatures act as this one: below it float32 would divide by zero."""


def distributions(processed: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """The law each row's token is drawn from. [R, V] float32 -> [R, V] float32 log-probs, -inf outside the support.

    top_k keeps all that tie with the k-th best. top_p keeps the smallest set of at least that mass; among equals at
    its edge the lowest ids. min_p keeps what has at least min_p times the largest probability. Each acts on what the
    one before it left, renormalised. Temperature 0 is all mass on `argmax`. A row depends on no other row.
    """
    params = [row.state.params for row in rows]
    best = processed.amax(dim=1, keepdim=True)  # [R, 1]
    scaled = processed - best  # [R, V], largest 0
    if any(p.temperature != 1.0 for p in params):
        scaled /= _column([max(p.temperature, _COLDEST) for p in params], scaled)
    _keep_top_k(scaled, processed, params)
    _keep_top_p(scaled, params)
    _keep_min_p(scaled, params)
    _keep_best(scaled, processed, params)
    return scaled.log_softmax(dim=1)


def argmax(processed: Tensor) -> Tensor:
    """[R, V] float32 -> [R] int64: the best id; the lowest among equals, on every device."""
    return processed.argmax(dim=1)


def probabilities(log_probs: Tensor) -> Tensor:
    """[..., V] float32 log-probs -> [..., V] float64, each row divided by its own sum: the law of `draw`."""
    weights = log_probs.double().exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def draw(log_probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF. log_probs [R, V] float32, u [R] float64 in (0, 1) -> [R] int64 ids, never one of probability 0."""
    return draw_weights(log_probs.double().exp(), u)


def draw_weights(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF over weights [R, V] float64 >= 0 that need not sum to 1; u [R] float64 in (0, 1) -> [R] int64.

    Raises ValueError for a row without positive finite mass.
    """
    cdf = weights.cumsum(dim=1)  # [R, V] float64
    total = cdf[:, -1]
    if not bool(((total > 0) & total.isfinite()).all()):
        raise ValueError(f"nothing to draw from: rows sum to {total.tolist()}")
    reached = (weights > 0) & (cdf > (u * total)[:, None])  # a parallel scan may round its sum upwards over a zero
    ids = reached.byte().argmax(dim=1)
    missed = (~reached.any(dim=1)).nonzero()[:, 0]  # or end below u * total: then the last id with mass
    if len(missed):
        ids[missed] = weights.shape[1] - 1 - (weights[missed] > 0).flip(1).byte().argmax(dim=1)
    return ids


def truncate_topk(log_probs: Tensor, n: int) -> Tensor:
    """The n most likely of each row, renormalised: the law the draft then draws from. [R, V] float32 -> the same.

    Rows with a support of at most n entries come back unchanged.
    """
    if n < 1:
        raise ValueError(f"n is {n}, must be at least 1")
    if n >= log_probs.shape[1]:
        return log_probs
    kept, ids = log_probs.topk(n, dim=1)  # [R, n]
    normalised = (kept.double() - kept.double().logsumexp(dim=1, keepdim=True)).float()
    truncated = torch.full_like(log_probs, -torch.inf).scatter_(1, ids, normalised)
    fits = (log_probs > -torch.inf).sum(dim=1, keepdim=True) <= n  # [R, 1]
    return torch.where(fits, log_probs, truncated)


def top_logprobs(raw_logits: Tensor, chosen: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is reported with a token: log-probs under the unmodified model, before penalties and temperature.

    raw_logits [R, V] float32, chosen [R] int64, 0 <= n <= V -> log-prob of the chosen [R] float32, ids of the n best
    [R, n] int64, their log-probs [R, n] float32; most likely first, the lowest id first among equals.
    """
    log_probs = raw_logits.float().log_softmax(dim=1)
    ids = log_probs.topk(n, dim=1).indices.sort(dim=1).values
    order = log_probs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return log_probs.gather(1, chosen[:, None])[:, 0], ids.gather(1, order.indices), order.values


def _keep_top_k(scaled: Tensor, processed: Tensor, params: list[SamplingParams]) -> None:
    """In place. The threshold comes from the logits themselves: scaling could make near values equal."""
    vocab_size = scaled.shape[1]
    chosen = [r for r, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if not chosen:
        return
    index = torch.tensor(chosen, device=scaled.device)
    last = torch.tensor([params[r].top_k - 1 for r in chosen], device=scaled.device)
    logits = processed[index]  # [r, V]
    values = logits.topk(int(last.max()) + 1, dim=1).values
    threshold = values.gather(1, last[:, None])  # [r, 1]
    scaled[index] = scaled[index].masked_fill_(logits < threshold, -torch.inf)


def _keep_top_p(scaled: Tensor, params: list[SamplingParams]) -> None:
    """In place. A token stays while the mass of the more likely ones is below top_p."""
    chosen = [r for r, p in enumerate(params) if p.top_p < 1.0 and not p.greedy]
    if not chosen:
        return
    index = torch.tensor(chosen, device=scaled.device)
    x = scaled[index]  # [r, V]
    wanted = x.double().exp().sum(dim=1) * _column([params[r].top_p for r in chosen], x, torch.float64)[:, 0]  # [r]
    num_candidates = min(_NUM_CANDIDATES, x.shape[1])
    cut, num_equal, enough = _nucleus_edge(x.topk(num_candidates, dim=1).values, wanted)
    if num_candidates < x.shape[1] and not bool(enough.all()):
        wide = (~enough).nonzero()[:, 0]
        cut[wide], num_equal[wide], _ = _nucleus_edge(x[wide].sort(dim=1, descending=True).values, wanted[wide])
    equal = x == cut
    keep = (x > cut) | (equal & (equal.cumsum(dim=1) <= num_equal))
    scaled[index] = x.masked_fill_(~keep, -torch.inf)


def _nucleus_edge(best: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the smallest set of mass `wanted` ends. best [r, C] float32, descending; wanted [r] float64.

    Returns the smallest value in the set [r, 1], how many tokens of that value are in it [r, 1], and whether C
    tokens were enough [r].
    """
    weights = best.double().exp()
    cumulative = weights.cumsum(dim=1)
    kept = (cumulative - weights < wanted[:, None]).sum(dim=1, keepdim=True).clamp_min(1)  # [r, 1]
    cut = best.gather(1, kept - 1)
    return cut, kept - (best > cut).sum(dim=1, keepdim=True), cumulative[:, -1] >= wanted


def _keep_min_p(scaled: Tensor, params: list[SamplingParams]) -> None:
    """In place. The best token is at 0 whatever was cut before, so the bound is log(min_p)."""
    if any(p.min_p > 0.0 for p in params):
        bound = _column([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params], scaled)
        scaled.masked_fill_(scaled < bound, -torch.inf)


def _keep_best(scaled: Tensor, processed: Tensor, params: list[SamplingParams]) -> None:
    """In place: temperature 0."""
    chosen = [r for r, p in enumerate(params) if p.greedy]
    if chosen:
        index = torch.tensor(chosen, device=scaled.device)
        scaled[index] = -torch.inf
        scaled[index, argmax(processed[index])] = 0.0


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[R] -> [R, 1] on the device of `like`."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device)[:, None]
