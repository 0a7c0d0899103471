"""Decide which draft tokens are accepted, and what comes after them, under `rejection`. Pure: no model, no I/O.

All rules have exactly the target's distribution.

*Draws after a node.* A node's draws are tested one after the other: the first against the target's distribution, each
further one against what the target has left of it; where none is accepted, the target draws from what it has left.
For a chain, one draw a node: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
decoding", ICML 2023, Algorithm 1; Chen et al., "Accelerating large language model decoding with speculative sampling",
2023. For siblings: Miao et al., "SpecInfer: accelerating large language model serving with tree-based speculative
inference and verification", ASPLOS 2024, Algorithm 2 (multi-step speculative sampling), drawn *without replacement*
(Jeon et al., "Recursive speculative decoding", 2024): each is tested with the distribution that was left to draw it
from.

It is exact for every tree that grows child by child, each drawn from what is left of its parent's distribution,
whichever parent is chosen for the next child, and when to stop, by what was drawn before: one more last child changes
the distribution of nothing. It splits the residual that would have been drawn from into what is accepted of it and what
is left, and after what is accepted the target continues as it would have. Leaving out a child for its own value is what
would not be exact. Several drafters may draw after the same node, each from a distribution of its own: their draws are
tested drafter by drafter, in an order that nothing drawn decides, and a token that two of them drew is one node and two
draws. A child that nobody drew is deterministic: where all draws are rejected the target draws from what it has left,
and goes on behind the child that is this token.

*A block.* Of a chain that is drawn as a whole: Sun et al., "Block verification accelerates speculative decoding", ICLR
2025, Algorithm 2, which accepts as many tokens or more; the two differ from two draft tokens on.

`accept_draw` and `accept_block_one` decide on the host and look at no position that they need not see; `accept_draws`
and `accept_block` decide for a batch on a device, where waiting for a position's outcome would cost more than computing
them all. Called by the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.coupled import picked
from outrider.engine.sampling.row_law import Array, Ids, RowLaw, Weights
from outrider.engine.sampling.sampling import probabilities
from outrider.engine.sampling.wire_tensors import scattered

OwnDraw = Callable[[int, Weights, Ids | None], int]
"""(place, weights [N] float64, their ids [N] or None for 0 .. N - 1): the index of the token that the target draws
itself after so many drafts."""


def accept_draw(
    target: RowLaw, draws: Sequence[tuple[int, RowLaw | None, float]], lenience: float = 1.0
) -> tuple[int | None, Weights]:
    """Test the draws after one node in order. Return the token of the first that is accepted, None where none is, and
    what the target has left then: weights [N] of the entries of its distribution.

    draws: of each the token, what it was drawn from (None: what is left of that of the draw before it), and its uniform
    number. lenience: every draft probability counts as so much of it (Leviathan et al., A.5). What is accepted has mass
    min(draft, target / lenience), and what is recovered adds max(target / lenience - draft, 0) at most: no token comes
    more than 1 / lenience times as often as the target says it.
    """
    if not draws:
        return None, target.weights
    left = target.probs()
    draft: RowLaw | None = None
    previous_id = 0
    for token_id, distribution, u in draws:
        if distribution is not None:
            draft = distribution
        else:
            assert draft is not None, "the first draw has a distribution"
            draft = draft.without(previous_id)
        place, draft_prob = target.place_of(token_id), lenience * draft.prob(token_id)
        if place is not None and draft_prob > 0 and u < left[place] / draft_prob:
            return token_id, left
        left = residual(left, lenience * draft.probs_at(target))
        left = left / left.sum()
        previous_id = token_id
    return None, left


@dataclass(frozen=True, slots=True)
class DrawTable:
    """The draws after N nodes, T of one at most, those of a node in the order in which they are tested."""

    token_ids: NDArray[np.int64]
    """[N, T]; padding may hold anything."""
    uniforms: NDArray[np.float64]
    """[N, T]; padding may hold anything."""
    num_draws: NDArray[np.int64]
    """[N]."""
    distributions: Sequence[Sequence[tuple[int, RowLaw]]]
    """[T] lists of nodes with what their draws at that place were drawn from; a node that is not listed: what is left
    of that of the draw before it."""
    lenience: NDArray[np.float64]
    """[N]: as `accept_draw` takes it."""


def accept_draws(draws: DrawTable, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `accept_draw` for N nodes. target_probs: the target's distributions [N, V] float64.

    Returns the token that is accepted after each node, -1 for none, [N] int64, and what the target has left [N, V].
    """
    device, left = target_probs.device, target_probs
    num_nodes, max_draws = draws.token_ids.shape
    token_ids, uniforms = to_device(draws.token_ids, device), to_device(draws.uniforms, device)
    num_draws, lenience = to_device(draws.num_draws, device), to_device(draws.lenience[:, None], device)
    accepted_ids = torch.full((num_nodes,), -1, dtype=torch.int64, device=device)
    weights = torch.zeros_like(left)  # of the draft's distributions, not normalised
    for place in range(max_draws):
        if draws.distributions[place]:
            is_new = np.zeros((num_nodes, 1), dtype=np.bool_)
            is_new[[node for node, _ in draws.distributions[place]]] = True
            new = scattered(draws.distributions[place], num_nodes, left.shape[1], device).double().exp()
            weights = torch.where(to_device(is_new, device), new, weights)
        at = token_ids[:, place : place + 1]  # [N, 1]
        draft = weights / weights.sum(dim=1, keepdim=True)
        draft *= lenience
        draft_prob = draft.gather(1, at)[:, 0]
        is_tested = (place < num_draws) & (accepted_ids < 0)
        is_accepted = is_tested & (draft_prob > 0) & (uniforms[:, place] < left.gather(1, at)[:, 0] / draft_prob)
        accepted_ids = torch.where(is_accepted, at[:, 0], accepted_ids)
        rest = residual(left, draft)
        rest /= rest.sum(dim=1, keepdim=True)
        left = torch.where((is_tested & ~is_accepted)[:, None], rest, left)
        weights.scatter_(1, at, 0.0)
    return accepted_ids, left


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
    """Decide as `accept_block` for one slot; return (num_accepted, next id).

    target_law(j): the target's law at position j, asked for in order and only as far as drafts may be kept.
    draft_laws [K]: what draft_ids [K] were drawn from. Raises NothingToDraw.
    """
    num_drafted, targets, kept = len(draft_ids), list[RowLaw](), [1.0]
    for j, (token_id, draft) in enumerate(zip(draft_ids, draft_laws, strict=True)):
        targets.append(target_law(j))
        draft_prob = draft.prob(token_id)
        kept.append(min(1.0, kept[j] * targets[j].prob(token_id) / draft_prob) if draft_prob > 0 else 0.0)
        if kept[-1] == 0.0:  # neither this token nor one after it can be kept
            break
    if len(kept) == num_drafted + 1 and (not num_drafted or noise.accept[num_drafted - 1] < kept[num_drafted]):
        bonus = target_law(num_drafted)
        return num_drafted, bonus.id_of(noise.own(num_drafted, bonus.weights, bonus.ids))
    for n, target in reversed(list(enumerate(targets))):  # the law after n drafts
        left = (kept[n] * target.probs() - draft_laws[n].probs_at(target)).clip(min=0.0)
        mass = float(left.sum())
        if n == 0 or noise.accept[n - 1] < _block_share(mass, kept[n]):
            weights = left if mass > 0 else target.probs()  # equal laws, up to rounding
            return n, target.id_of(noise.own(n, weights, target.ids))
    raise AssertionError("unreachable: n = 0 returns")


def _block_share(mass: float, kept: float) -> float:
    """Return the probability of stopping at a position, given that no later one was. Sun et al., equation 4."""
    whole = mass + 1.0 - kept
    return mass / whole if whole > 0 else 1.0


@dataclass(frozen=True)
class Accepted:
    """The decisions of a round, per row. The first num_accepted drafts and then next_ids are the target's output."""

    num_accepted: Tensor
    """[B] int64, at most num_drafted."""
    next_ids: Tensor
    """[B] int64: recovered when num_accepted < num_drafted, else bonus."""


def accept_block(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    accept_u: Tensor,
    keys: Tensor,
) -> Accepted:
    """Accept the longest prefix of the drafts that a draw of its own accepts.

    target_log_probs [B, K+1, V] float32 and draft_log_probs [B, K, V] float32, -inf outside the support; row b's extra
    token comes from target_log_probs[b, num_drafted[b]]. draft_ids [B, K] int64, drawn from `draft_log_probs` as
    `inverse_cdf` does. num_drafted [B] int64 in [0, K]; whatever lies past it is padding and may hold anything.
    accept_u [B, K]: float64 in (0, 1), independent of each other and of the drafts. keys [B, 4]: `coupled.device_keys`
    of the position of the first draft, from which on numbers draw what is no draft.

    kept[n] = min(1, kept[n - 1] * target / draft) of the first n drafts; the prefix of n < num_drafted of them is kept
    with probability left / (left + 1 - kept[n]), left = sum of max(kept[n] * target - draft, 0) after it, the whole
    with kept[num_drafted]. What follows a prefix is drawn from max(kept[n] * target - draft, 0). Both sides divide by
    the float64 sums of the float32 rows.
    """
    kept = [torch.ones(len(num_drafted), dtype=torch.float64, device=num_drafted.device)]  # [B] each
    num_accepted = torch.zeros_like(num_drafted)
    for j in range(draft_ids.shape[1]):  # a position at a time: float64 rows of the whole batch would be large
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
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    share = torch.stack(kept)[num_accepted, rows]  # [B]
    weights = probabilities(target_log_probs[rows, num_accepted])  # [B, V] float64
    # Computed for every row: asking which ones are rejected would be a wait.
    draft_probs = probabilities(draft_log_probs[rows, num_accepted.clamp_max(draft_ids.shape[1] - 1)])
    is_rejected = (num_accepted < num_drafted)[:, None]
    weights = torch.where(is_rejected, residual(share[:, None] * weights, draft_probs), weights)
    at_next = torch.cat((keys[:, :3], keys[:, 3:] + num_accepted[:, None]), dim=1)
    return Accepted(num_accepted, picked(weights.log(), at_next))


def residual(target_probs: Array, draft_probs: Array) -> Array:
    """Return max(target - draft, 0), not normalised. All [..., V] float64, of NumPy or torch.

    Where nothing is left the two laws are equal up to rounding and a rejection has probability of about 2^-52: the
    target's own law stands in.
    """
    positive = (target_probs - draft_probs).clip(min=0.0)
    nothing_left = (positive.sum(-1) <= 0)[..., None]
    return positive + target_probs * nothing_left
