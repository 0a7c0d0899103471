"""Decide which draft tokens are kept, and what comes after them. Pure functions: no model, no I/O.

Two rules for drafts that were drawn from known laws, both with exactly the target's law. By token: Leviathan, Kalman
and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, Algorithm 1; Chen et al.,
"Accelerating large language model decoding with speculative sampling", 2023. By block: Sun et al., "Block verification
accelerates speculative decoding", ICLR 2025, Algorithm 2, which keeps as many tokens or more; the two differ from two
drafts on. And one for drafts that are guesses of what the target says.

`..._one` decides one slot on the host and looks at no position that it need not see; the others decide a batch on a
device, where waiting for a position's outcome would cost more than computing them all. Called by the verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.sampling.coupled import picked
from outrider.engine.sampling.row_law import Array, Ids, RowLaw, Weights
from outrider.engine.sampling.sampling import probabilities


@dataclass(frozen=True)
class Accepted:
    """The decisions of a round, per row. The first num_accepted drafts and then next_ids are the target's output."""

    num_accepted: Tensor
    """[B] int64, at most num_drafted."""
    next_ids: Tensor
    """[B] int64: recovered when num_accepted < num_drafted, else bonus (plain when nothing was drafted)."""
    sound: Tensor
    """[B] bool: whether there was positive finite mass to draw next_ids from."""


OwnDraw = Callable[[int, Weights, Ids | None], int]
"""(place, weights [N] float64, their ids [N] or None for 0 .. N - 1): the index of the token that the target draws
itself after so many drafts."""


@dataclass(frozen=True, slots=True)
class Noise:
    """One slot's numbers."""

    accept: NDArray[np.float64]
    """[K] uniforms in (0, 1), float64, independent of each other, of the drafts, and of earlier rounds: block
    verification looks at positions that it then leaves to the next."""
    own: OwnDraw
    """Draws with numbers of the position, which are independent of all these."""


def accept_block_one(
    target_law: Callable[[int], RowLaw], draft_laws: Sequence[RowLaw], draft_ids: Sequence[int], noise: Noise
) -> tuple[int, int]:
    """Decide as `accept_block` for one slot; arguments and result are those of `accept_token_one`."""
    num_drafted, targets, kept = len(draft_ids), list[RowLaw](), [1.0]
    for j, (token_id, draft) in enumerate(zip(draft_ids, draft_laws, strict=True)):
        targets.append(target_law(j))
        draft_prob = draft.prob(token_id)
        kept.append(min(1.0, kept[j] * targets[j].prob(token_id) / draft_prob) if draft_prob > 0 else 0.0)
        if kept[-1] == 0.0:  # neither this token nor one after it can be kept
            break
    if len(kept) == num_drafted + 1 and (not num_drafted or noise.accept[num_drafted - 1] < kept[num_drafted]):
        return num_drafted, _draw(target_law(num_drafted), num_drafted, noise)
    for n, target in reversed(list(enumerate(targets))):  # the law after n drafts
        left = (kept[n] * target.probs() - draft_laws[n].probs_at(target)).clip(min=0.0)
        mass = float(left.sum())
        if n == 0 or noise.accept[n - 1] < _block_share(mass, kept[n]):
            weights = left if mass > 0 else target.probs()  # equal laws, up to rounding
            return n, target.id_of(noise.own(n, weights, target.ids))
    raise AssertionError("unreachable: n = 0 returns")


def _draw(law: RowLaw, place: int, noise: Noise) -> int:
    return law.id_of(noise.own(place, law.weights, law.ids))


def _block_share(mass: float, kept: float) -> float:
    """Return the probability of stopping at a position, given that no later one was. Sun et al., equation 4."""
    whole = mass + 1.0 - kept
    return mass / whole if whole > 0 else 1.0


def accept_token_one(
    target_law: Callable[[int], RowLaw],
    draft_laws: Sequence[RowLaw],
    draft_ids: Sequence[int],
    noise: Noise,
    lenience: float = 1.0,
) -> tuple[int, int]:
    """Decide as `accept_token` for one slot; return (num_accepted, next id).

    target_law(j): the target's law at position j, asked for in order and only as far as drafts are kept.
    draft_laws [K]: what draft_ids [K] were drawn from. Raises NothingToDraw.
    """
    for j, (token_id, draft) in enumerate(zip(draft_ids, draft_laws, strict=True)):
        target, draft_prob = target_law(j), lenience * draft.prob(token_id)
        if draft_prob > 0 and noise.accept[j] < target.prob(token_id) / draft_prob:
            continue  # a token that the draft could not have drawn is never kept
        left = residual(target.probs(), lenience * draft.probs_at(target))
        return j, target.id_of(noise.own(j, left, target.ids))
    num_drafted = len(draft_ids)
    return num_drafted, _draw(target_law(num_drafted), num_drafted, noise)


def accept_matching(target_ids: Tensor, draft_ids: Tensor, num_drafted: Tensor) -> Accepted:
    """Keep drafts while they are what the target says: greedy and coupled.

    target_ids [B, K+1] int64: the target's own token at each position; draft_ids [B, K] int64; num_drafted [B] int64
    in [0, K]: row b uses its first num_drafted[b] drafts, the rest is padding and may hold anything.
    """
    kept = target_ids[:, :-1] == draft_ids  # [B, K]
    num_accepted = _leading(kept, num_drafted)
    next_ids = target_ids.gather(1, num_accepted[:, None])[:, 0]
    return Accepted(num_accepted, next_ids, torch.ones_like(next_ids, dtype=torch.bool))


def accept_block(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    accept_u: Tensor,
    keys: Tensor,
) -> Accepted:
    """Keep the longest prefix of the drafts that a draw of its own keeps. Shapes as for `accept_token`.

    kept[n] = min(1, kept[n - 1] * target / draft) of the first n drafts; the prefix of n < num_drafted of them is kept
    with probability left / (left + 1 - kept[n]), left = sum of max(kept[n] * target - draft, 0) after it, the whole
    with kept[num_drafted]. What follows a prefix is drawn from max(kept[n] * target - draft, 0).
    """
    kept = [torch.ones(len(num_drafted), dtype=torch.float64, device=num_drafted.device)]  # [B] each
    num_accepted = torch.zeros_like(num_drafted)
    for j in range(draft_ids.shape[1]):
        target_probs, draft_probs = probabilities(target_log_probs[:, j]), probabilities(draft_log_probs[:, j])
        if j:
            mass = (kept[j][:, None] * target_probs - draft_probs).clip(min=0.0).sum(dim=1)
            whole = mass + 1.0 - kept[j]
            share = torch.where(whole > 0, mass / whole, 1.0)
            num_accepted = torch.where((j < num_drafted) & (accept_u[:, j - 1] < share), j, num_accepted)
        at = draft_ids[:, j : j + 1]
        target_prob, draft_prob = target_probs.gather(1, at)[:, 0], draft_probs.gather(1, at)[:, 0]
        ratio = torch.where(draft_prob > 0, target_prob / draft_prob, 0.0)
        kept.append((kept[j] * ratio).clamp_max(1.0))
        last = num_drafted == j + 1
        num_accepted = torch.where(last & (accept_u[:, j] < kept[j + 1]), j + 1, num_accepted)
    share = torch.stack(kept)[num_accepted, torch.arange(len(num_accepted), device=num_accepted.device)]  # [B]
    return _with_next(
        num_accepted,
        num_drafted,
        target_log_probs,
        draft_log_probs,
        keys,
        lambda target, draft: residual(share[:, None] * target, draft),
    )


def accept_token(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    accept_u: Tensor,
    keys: Tensor,
    lenience: Tensor | None = None,
) -> Accepted:
    """Keep draft j with probability min(1, target / draft); replace the first rejected one from max(target - draft, 0).

    target_log_probs [B, K+1, V] float32 and draft_log_probs [B, K, V] float32, -inf outside the support; row b's extra
    token comes from target_log_probs[b, num_drafted[b]]. draft_ids [B, K] int64, drawn from `draft_log_probs` as
    `inverse_cdf` does. num_drafted [B] int64 in [0, K]; whatever lies past it is padding and may hold anything.
    accept_u [B, K]: float64 in (0, 1), independent of each other and of the drafts. keys [B, 4]: `coupled.device_keys`
    of the position of the first draft, from which on numbers draw what is no draft.

    The output has the target's law to float64 rounding: both sides divide by the float64 sums of the float32 rows.

    lenience [B] float64 in (0, 1]: every draft probability counts as so much of it (Leviathan et al., A.5). Kept mass
    is min(draft, target / lenience), and what is recovered adds max(target / lenience - draft, 0) at most: no token
    comes more than 1 / lenience times as often as the target says it.
    """
    share = torch.ones(len(num_drafted), dtype=torch.float64, device=num_drafted.device)
    share = share if lenience is None else lenience
    accepted = [
        _accept(target_log_probs[:, j], draft_log_probs[:, j], draft_ids[:, j], share * accept_u[:, j])
        for j in range(draft_ids.shape[1])  # a position at a time: float64 rows of the whole batch would be large
    ]
    kept = torch.stack(accepted, dim=1) if accepted else torch.empty_like(draft_ids, dtype=torch.bool)  # [B, K]
    num_accepted = _leading(kept, num_drafted)
    return _with_next(
        num_accepted,
        num_drafted,
        target_log_probs,
        draft_log_probs,
        keys,
        lambda target, draft: residual(target, share[:, None] * draft),
    )


def _with_next(
    num_accepted: Tensor,
    num_drafted: Tensor,
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    keys: Tensor,
    left_of: Callable[[Tensor, Tensor], Tensor],
) -> Accepted:
    """Recover from left_of(target, draft) after a rejection, else draw from the target's law."""
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    weights = probabilities(target_log_probs[rows, num_accepted])  # [B, V] float64
    if draft_log_probs.shape[1]:  # computed for every row: asking which ones are rejected would be a wait
        at = num_accepted.clamp_max(draft_log_probs.shape[1] - 1)
        rejected = num_accepted < num_drafted  # [B]
        left = left_of(weights, probabilities(draft_log_probs[rows, at]))
        weights = torch.where(rejected[:, None], left, weights)
    at_next = torch.cat((keys[:, :3], keys[:, 3:] + num_accepted[:, None]), dim=1)
    total = weights.sum(dim=1)
    return Accepted(num_accepted, picked(weights.log(), at_next), (total > 0) & (total < torch.inf))


def residual(target_probs: Array, draft_probs: Array) -> Array:
    """Return max(target - draft, 0), not normalised. All [..., V] float64, of NumPy or torch.

    Where nothing is left the two laws are equal up to rounding and a rejection has probability of about 2^-52: the
    target's own law stands in.
    """
    positive = (target_probs - draft_probs).clip(min=0.0)
    nothing_left = (positive.sum(-1) <= 0)[..., None]
    return positive + target_probs * nothing_left


def _accept(target_log_probs: Tensor, draft_log_probs: Tensor, draft_ids: Tensor, u: Tensor) -> Tensor:
    """Decide one position. [B, V] float32 twice, [B] int64, [B] float64 -> [B] bool."""
    target_probs = probabilities(target_log_probs).gather(1, draft_ids[:, None])[:, 0]  # [B] float64
    draft_probs = probabilities(draft_log_probs).gather(1, draft_ids[:, None])[:, 0]
    # A token that the draft could not have drawn is never kept.
    return (draft_probs > 0) & (u < target_probs / draft_probs)


def _leading(kept: Tensor, num_drafted: Tensor) -> Tensor:
    """Return how many of each row's drafts are kept before the first that is not. [B, K] bool, [B] -> [B] int64."""
    drafted = torch.arange(kept.shape[1], device=kept.device) < num_drafted[:, None]  # [B, K]
    return (kept & drafted).long().cumprod(dim=1).sum(dim=1)
