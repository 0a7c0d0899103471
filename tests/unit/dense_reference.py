"""The chain of sampling parameters as it reads: every step over the whole vocabulary, in torch. What the product's
candidates-first code must equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.sampling.penalties import LogitRow
from outrider.wire.params import SamplingParams

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
        scaled[index, processed[index].argmax(dim=1)] = 0.0


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[R] -> [R, 1] on the device of `like`."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device)[:, None]
