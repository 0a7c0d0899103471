"""Which draft tokens are kept, and what comes after them. Pure functions: no model, no I/O.

`accept_one` decides one slot on the host and looks at no position past the first rejection; the others decide a batch
on a device, where waiting for a position's outcome would cost more than computing them all.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, Algorithm 1;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023. Called by the verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.row_law import RowLaw, draw_place
from outrider.engine.sampling import inverse_cdf, probabilities

Array = TypeVar("Array", Tensor, NDArray[np.float64])


@dataclass(frozen=True)
class Outcome:
    """What a round decided, per row. The first num_accepted drafts and then next_ids are the target's output."""

    num_accepted: Tensor
    """[B] int64, at most num_drafted."""
    next_ids: Tensor
    """[B] int64: recovered when num_accepted < num_drafted, else bonus (plain when nothing was drafted)."""
    sound: Tensor
    """[B] bool: there was positive finite mass to draw next_ids from."""


@dataclass(frozen=True, slots=True)
class Noise:
    """One slot's uniforms in (0, 1), float64, independent of each other and of the drafts."""

    accept: NDArray[np.float64]
    """[K]"""
    recover: NDArray[np.float64]
    """[K]"""
    target: NDArray[np.float64]
    """[K + 1]"""


def accept_one(
    target_law: Callable[[int], RowLaw], draft_laws: Sequence[RowLaw], draft_ids: Sequence[int], noise: Noise
) -> tuple[int, int]:
    """`accept_rejection` for one slot -> (num_accepted, next id).

    target_law(j): the target's law at position j, asked for in order and only as far as drafts are kept.
    draft_laws [K]: what draft_ids [K] were drawn from. Raises NothingToDraw.
    """
    for j, (token_id, draft) in enumerate(zip(draft_ids, draft_laws, strict=True)):
        target, draft_prob = target_law(j), draft.prob(token_id)
        if draft_prob > 0 and noise.accept[j] < target.prob(token_id) / draft_prob:
            continue  # a token that the draft could not have drawn is never kept
        left = residual(target.probs(), draft.probs_at(target))
        return j, target.id_of(draw_place(left, float(noise.recover[j])))
    num_drafted = len(draft_ids)
    return num_drafted, target_law(num_drafted).draw(float(noise.target[num_drafted]))


def accept_matching(target_ids: Tensor, draft_ids: Tensor, num_drafted: Tensor) -> Outcome:
    """Keep drafts while they are what the target says: greedy and coupled.

    target_ids [B, K+1] int64: the target's own token at each position; draft_ids [B, K] int64; num_drafted [B] int64
    in [0, K]: row b uses its first num_drafted[b] drafts, the rest is padding and may hold anything.
    """
    kept = target_ids[:, :-1] == draft_ids  # [B, K]
    num_accepted = _leading(kept, num_drafted)
    next_ids = target_ids.gather(1, num_accepted[:, None])[:, 0]
    return Outcome(num_accepted, next_ids, torch.ones_like(next_ids, dtype=torch.bool))


def accept_rejection(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    accept_u: Tensor,
    recover_u: Tensor,
    target_u: Tensor,
) -> Outcome:
    """Keep draft j with probability min(1, target / draft); replace the first rejected one from max(target - draft, 0).

    target_log_probs [B, K+1, V] float32 and draft_log_probs [B, K, V] float32, -inf outside the support; row b's extra
    token comes from target_log_probs[b, num_drafted[b]]. draft_ids [B, K] int64, drawn from `draft_log_probs` as
    `inverse_cdf` does. num_drafted [B] int64 in [0, K]; whatever lies past it is padding and may hold anything.
    accept_u, recover_u [B, K] and target_u [B, K+1]: float64 in (0, 1), independent of each other and of the drafts.

    The output has the target's law to float64 rounding: both sides divide by the float64 sums of the float32 rows.
    """
    accepted = [
        _accept(target_log_probs[:, j], draft_log_probs[:, j], draft_ids[:, j], accept_u[:, j])
        for j in range(draft_ids.shape[1])  # a position at a time: float64 rows of the whole batch would be large
    ]
    kept = torch.stack(accepted, dim=1) if accepted else torch.empty_like(draft_ids, dtype=torch.bool)  # [B, K]
    num_accepted = _leading(kept, num_drafted)
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    weights = probabilities(target_log_probs[rows, num_accepted])  # [B, V] float64
    u = target_u[rows, num_accepted]  # [B]
    if accepted:  # what a rejected row recovers from, computed for every row: asking which ones are would be a wait
        at = num_accepted.clamp_max(len(accepted) - 1)
        rejected = num_accepted < num_drafted  # [B]
        left = residual(weights, probabilities(draft_log_probs[rows, at]))
        weights = torch.where(rejected[:, None], left, weights)
        u = torch.where(rejected, recover_u[rows, at], u)
    return Outcome(num_accepted, *inverse_cdf(weights, u))


def residual(target_probs: Array, draft_probs: Array) -> Array:
    """max(target - draft, 0), not normalised. All [..., V] float64, of NumPy or torch.

    Where nothing is left the two laws are equal up to rounding and a rejection has probability of about 2^-52: the
    target's own law stands in.
    """
    positive = (target_probs - draft_probs).clip(min=0.0)
    nothing_left = (positive.sum(-1) <= 0)[..., None]
    return positive + target_probs * nothing_left


def _accept(target_log_probs: Tensor, draft_log_probs: Tensor, draft_ids: Tensor, u: Tensor) -> Tensor:
    """One position. [B, V] float32 twice, [B] int64, [B] float64 -> [B] bool."""
    target_probs = probabilities(target_log_probs).gather(1, draft_ids[:, None])[:, 0]  # [B] float64
    draft_probs = probabilities(draft_log_probs).gather(1, draft_ids[:, None])[:, 0]
    # A token that the draft could not have drawn is never kept.
    return (draft_probs > 0) & (u < target_probs / draft_probs)


def _leading(kept: Tensor, num_drafted: Tensor) -> Tensor:
    """Length of the first run of True within each row's drafts. kept [B, K] bool, num_drafted [B] -> [B] int64."""
    drafted = torch.arange(kept.shape[1], device=kept.device) < num_drafted[:, None]  # [B, K]
    return (kept & drafted).long().cumprod(dim=1).sum(dim=1)
