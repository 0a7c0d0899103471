"""The acceptance rules of `rejection`: the accepted draft tokens, and the token after them. Pure; used by the target.

The output of each rule has exactly the target's distribution.

*Draws after a node.* The draws after a node are tested one after the other. With p the target's distribution there and
q the draft's, the first draw x is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes its
residual, norm(max(p - q, 0)), against which the next draw is tested. Where none is accepted, the target draws from the
last residual. For a chain, with one draw a node: Leviathan, Kalman and Matias, "Fast inference from transformers via
speculative decoding", ICML 2023, Algorithm 1; Chen et al., "Accelerating large language model decoding with speculative
sampling", 2023, Algorithm 2. For siblings: Miao et al., "SpecInfer: accelerating large language model serving with
tree-based speculative inference and verification", ASPLOS 2024, Algorithm 2 (multi-step speculative sampling), drawn
*without replacement* (Jeon et al., "Recursive speculative decoding", 2024): q of a sibling is that of the previous one
without its token.

    p = (0.5, 0.3, 0.2), q = (0.2, 0.8, 0): a draw of token 1 is accepted with 0.3 / 0.8 = 0.375; after its rejection
    the residual is (0.3, 0, 0.2) / 0.5 = (0.6, 0, 0.4)

This is exact for every tree that grows child by child, whichever node gets the next child and whenever growth stops,
even if earlier draws decide both. One more last child changes no distribution: the residual from which the target would
have drawn is split into an accepted part and a smaller residual. It is not exact to leave out a child because of its
own value. Several drafters may draw after one node: their draws are tested drafter by drafter, in an order that no draw
decides; a token that two of them drew is one node with two draws. A child without a draw is deterministic: if all draws
are rejected and the target itself draws this token, the walk continues after that child.

*A block.* For a chain that one drafter drew: Sun et al., "Block verification accelerates speculative decoding", ICLR
2025, Algorithm 2, which accepts at least as many tokens. The two rules differ from two draft tokens on.

`accept_draw` and `accept_block_one` decide one slot on the host, and compute no position that they do not need.
`accept_draws` and `accept_block` decide a batch on a device, where waiting for the outcome of a position would cost
more than computing all. Shapes: B slots, N nodes, K draft tokens, M draws after one node, V ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.coupled import pick
from outrider.engine.sampling.device_sampling import probabilities
from outrider.engine.sampling.token_distribution import Array, Ids, TokenDistribution, Weights
from outrider.engine.sampling.wire_tensors import scatter

OwnDraw = Callable[[int, Weights, Ids | None], int]
"""Function (depth, weights, ids) that draws the target's own token after `depth` accepted draft tokens and returns the
index of its weight. weights: its probabilities up to a factor, [N] float64. ids: token ids of the weights, [N]; None
for ids 0 .. N - 1."""


def accept_draw(
    target: TokenDistribution, draws: Sequence[tuple[int, TokenDistribution | None, float]], lenience: float = 1.0
) -> tuple[int | None, Weights]:
    """Test, one after the other, the draft tokens that were drawn after one node: Leviathan et al. (2023), Algorithm 1;
    for several of them SpecInfer, Algorithm 2.

    Returns the first accepted token, or None, and the target's residual: weights [N] float64 for the entries of
    `target`. If no draft token is accepted, the target draws from the residual.

    draws: (token, distribution, uniform number) of each draft token. Distribution None stands for the distribution of
    the previous one without that token. lenience: factor on every draft probability (Leviathan et al., A.5). With it,
    no token comes more than 1 / lenience times as often as the target draws it. Let p and q be the target's and the
    draft's probability of a token. It comes as an accepted token with probability min(q, p / lenience), and as a
    recovered one with at most max(p / lenience - q, 0).
    """
    if not draws:
        return None, target.weights
    left = target.probs()  # [N]: p, then its residuals
    draft: TokenDistribution | None = None
    previous_id = 0
    for token_id, distribution, u in draws:
        if distribution is not None:
            draft = distribution
        else:
            assert draft is not None, "the first draw has a distribution"
            draft = draft.without(previous_id)
        place = target.index_of(token_id)
        draft_prob = lenience * draft.prob(token_id)
        if place is not None and draft_prob > 0 and u < left[place] / draft_prob:
            return token_id, left
        left = residual(left, lenience * draft.probs_at(target))
        left = left / left.sum()
        previous_id = token_id
    return None, left


@dataclass(frozen=True, slots=True)
class DrawTable:
    """Draft tokens that were drawn after N nodes, at most M after one node, in the order in which they are tested.

    Example: after node 0 one drafter drew tokens a and b, after node 1 none was drawn. Then num_draws is [2, 0] and
    token_ids [[a, b], [?, ?]]. distributions is [[(0, q)], []]: a was drawn after node 0 from q; b, drawn from q
    without a, needs no entry.
    """

    token_ids: NDArray[np.int64]
    """Token id of each draft token, [N, M] for at most M draft tokens after a node; padding may hold anything."""
    uniforms: NDArray[np.float64]
    """Uniform number by which each draft token is tested, [N, M] for at most M draft tokens after one of N nodes;
    padding may hold anything."""
    num_draws: NDArray[np.int64]
    """Number of draft tokens that were drawn after each node, [N]."""
    distributions: Sequence[Sequence[tuple[int, TokenDistribution]]]
    """distributions[t] lists (node, distribution) for the draft tokens that are tested as the t-th after their nodes,
    from 0. A node is left out if its t-th draft token was drawn without replacement, from the same distribution as its
    draft token t - 1 but without that token."""
    lenience: NDArray[np.float64]
    """Lenience of each node's request, [N]."""


def accept_draws(draws: DrawTable, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Test the draft tokens after each of N nodes one after the other, as `accept_draw` does for one node.
    target_probs: the target's distribution after each node, [N, V] float64.

    Returns the id of the accepted token after each node, -1 if all were rejected, [N] int64, and the target's
    residuals, [N, V] float64.
    """
    device = target_probs.device
    num_nodes, max_draws = draws.token_ids.shape
    token_ids = to_device(draws.token_ids, device)  # [N, M]
    uniforms = to_device(draws.uniforms, device)  # [N, M]
    num_draws = to_device(draws.num_draws, device)  # [N]
    lenience = to_device(draws.lenience[:, None], device)  # [N, 1]
    accepted_ids = torch.full((num_nodes,), -1, dtype=torch.int64, device=device)  # [N]
    left = target_probs  # [N, V]: p, then its residuals
    weights = torch.zeros_like(left)  # [N, V]: q of the draws at this place, not normalised
    for place in range(max_draws):
        if draws.distributions[place]:
            is_new = np.zeros((num_nodes, 1), dtype=np.bool_)
            is_new[[node for node, _ in draws.distributions[place]]] = True
            new = scatter(draws.distributions[place], num_nodes, left.shape[1], device).double().exp()  # [N, V]
            weights = torch.where(to_device(is_new, device), new, weights)
        at = token_ids[:, place : place + 1]  # [N, 1]
        draft = weights / weights.sum(dim=1, keepdim=True)  # [N, V]
        draft *= lenience
        draft_prob = draft.gather(1, at)[:, 0]  # [N]
        is_tested = (place < num_draws) & (accepted_ids < 0)  # [N]
        is_accepted = is_tested & (draft_prob > 0) & (uniforms[:, place] < left.gather(1, at)[:, 0] / draft_prob)  # [N]
        accepted_ids = torch.where(is_accepted, at[:, 0], accepted_ids)
        rest = residual(left, draft)  # [N, V]
        rest /= rest.sum(dim=1, keepdim=True)
        left = torch.where((is_tested & ~is_accepted)[:, None], rest, left)
        weights.scatter_(1, at, 0.0)
    return accepted_ids, left


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers for the decision on one slot's draft tokens in one step."""

    accept: NDArray[np.float64]
    """Uniform numbers in (0, 1) by which draft tokens are accepted, [K]. They are independent of one another, of the
    numbers by which the tokens were drawn, and of earlier rounds' numbers at the same positions: block verification
    also uses numbers of positions after those that it decides."""
    own: OwnDraw
    """Function that draws the target's own token. Its random numbers are independent of those by which draft tokens are
    drawn and accepted."""


def accept_block_one(
    target_at: Callable[[int], TokenDistribution],
    drawn_from: Sequence[TokenDistribution],
    draft_ids: Sequence[int],
    noise: Noise,
) -> tuple[int, int]:
    """Decide how many draft tokens of one slot's chain are accepted, by block verification: Sun et al. (2025),
    Algorithm 2. Return (number of accepted draft tokens, id of the token after them).

    target_at: function that returns the target's distribution after the first n draft tokens. It is called with n = 0,
    1, .., and only as far as draft tokens may be accepted. drawn_from: the distribution from which each of draft_ids
    [K] was drawn, [K]. Raises EmptyDistribution if the weights of the next token have no positive finite sum.
    """
    num_drafted = len(draft_ids)
    targets = list[TokenDistribution]()
    kept = [1.0]  # by number of draft tokens, as in `accept_block`
    for depth, (token_id, draft) in enumerate(zip(draft_ids, drawn_from, strict=True)):
        target = target_at(depth)
        targets.append(target)
        draft_prob = draft.prob(token_id)
        next_kept = 0.0
        if draft_prob > 0:
            next_kept = min(1.0, kept[depth] * target.prob(token_id) / draft_prob)
        kept.append(next_kept)
        if next_kept == 0.0:  # neither this token nor one after it can be accepted
            break
    if len(kept) == num_drafted + 1 and (not num_drafted or noise.accept[num_drafted - 1] < kept[num_drafted]):
        bonus = target_at(num_drafted)
        return num_drafted, bonus.id_of(noise.own(num_drafted, bonus.weights, bonus.ids))
    for num in reversed(range(len(targets))):  # accepted draft tokens
        target = targets[num]
        left = (kept[num] * target.probs() - drawn_from[num].probs_at(target)).clip(min=0.0)  # [N]
        mass = float(left.sum())
        if num == 0 or noise.accept[num - 1] < _block_share(mass, kept[num]):
            if not mass > 0:  # the distributions are equal, up to rounding
                left = target.probs()
            return num, target.id_of(noise.own(num, left, target.ids))
    raise AssertionError("unreachable: num = 0 returns")


def _block_share(mass: float, kept: float) -> float:
    """Return the probability of stopping at a position, given that no later one was accepted. Sun et al., equation
    4.
    """
    whole = mass + 1.0 - kept
    if whole > 0:
        return mass / whole
    return 1.0


@dataclass(frozen=True)
class ChainDecisions:
    """Decisions on B chains. The first num_accepted draft tokens of a chain are accepted, and the id in next_ids
    follows them.
    """

    num_accepted: Tensor
    """Number of accepted draft tokens, [B] int64."""
    next_ids: Tensor
    """Id after the accepted tokens, [B] int64: the recovered token if a draft token was rejected, else the bonus
    token."""


def accept_block(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    accept_u: Tensor,
    keys: Tensor,
) -> ChainDecisions:
    """Decide how many draft tokens of each of B chains are accepted, by block verification: Sun et al. (2025),
    Algorithm 2.

    target_log_probs [B, K + 1, V] and draft_log_probs [B, K, V] float32, -inf for no mass; both are normalised by the
    float64 sums of their rows. draft_ids [B, K] int64, drawn from `draft_log_probs`. num_drafted [B] int64 in [0, K]:
    number of draft tokens per chain; positions after them are padding and may hold anything. accept_u [B, K] float64 in
    (0, 1), independent of one another and of the draws. keys [B, 4] int64: `coupled.device_keys` of the first draft
    token's position, with which the next ids are drawn.

    Let p and q be the target's and the draft's distribution after the first n draft tokens, and x the next draft token.
    Then kept[0] = 1 and kept[n + 1] = min(1, kept[n] * p(x) / q(x)). The whole chain is accepted with probability
    kept[K]. Otherwise prefixes are tried from the longest to the shortest. A prefix of n tokens is accepted with
    probability m / (m + 1 - kept[n]) (equation 4), where m is the mass of max(kept[n] * p - q, 0). The next id is drawn
    from that maximum.
    """
    kept = [torch.ones(len(num_drafted), dtype=torch.float64, device=num_drafted.device)]  # [B] each
    num_accepted = torch.zeros_like(num_drafted)
    for j in range(draft_ids.shape[1]):  # a position at a time: float64 rows of the whole batch would be large
        target_probs = probabilities(target_log_probs[:, j])  # [B, V] float64
        draft_probs = probabilities(draft_log_probs[:, j])  # [B, V] float64
        if j:
            mass = (kept[j][:, None] * target_probs - draft_probs).clip(min=0.0).sum(dim=1)  # [B]
            whole = mass + 1.0 - kept[j]  # [B]
            stop_prob = torch.where(whole > 0, mass / whole, 1.0)  # [B]
            num_accepted = torch.where((j < num_drafted) & (accept_u[:, j - 1] < stop_prob), j, num_accepted)
        at = draft_ids[:, j : j + 1]  # [B, 1]
        target_prob = target_probs.gather(1, at)[:, 0]  # [B]
        draft_prob = draft_probs.gather(1, at)[:, 0]  # [B]
        ratio = torch.where(draft_prob > 0, target_prob / draft_prob, 0.0)  # [B]
        kept.append((kept[j] * ratio).clamp_max(1.0))
        is_last = num_drafted == j + 1  # [B]
        num_accepted = torch.where(is_last & (accept_u[:, j] < kept[j + 1]), j + 1, num_accepted)
    rows = torch.arange(len(num_accepted), device=num_accepted.device)  # [B]
    kept_then = torch.stack(kept)[num_accepted, rows]  # [B]
    weights = probabilities(target_log_probs[rows, num_accepted])  # [B, V] float64
    # Computed for every row: the host would have to wait to learn which ones are rejected.
    draft_probs = probabilities(draft_log_probs[rows, num_accepted.clamp_max(draft_ids.shape[1] - 1)])  # [B, V]
    is_rejected = (num_accepted < num_drafted)[:, None]  # [B, 1]
    weights = torch.where(is_rejected, residual(kept_then[:, None] * weights, draft_probs), weights)
    at_next = torch.cat((keys[:, :3], keys[:, 3:] + num_accepted[:, None]), dim=1)  # [B, 4]
    return ChainDecisions(num_accepted, pick(weights.log(), at_next))


def residual(target_probs: Array, draft_probs: Array) -> Array:
    """Return max(target - draft, 0), not normalised. All arrays are [..., V] float64, of NumPy or torch.

    If the result is 0 everywhere, the two distributions are equal up to rounding, and a rejection has a probability of
    about 2^-52; then the target's distribution is returned.
    """
    positive = (target_probs - draft_probs).clip(min=0.0)  # [..., V]
    nothing_left = (positive.sum(-1) <= 0)[..., None]  # [..., 1]
    return positive + target_probs * nothing_left
