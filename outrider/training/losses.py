"""Losses between a drafter's logits and the target's law at the same places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

LossName = Literal["kl", "lk"]
LOSSES: tuple[str, ...] = get_args(LossName)
LK_DECAY = 3.0
"""How fast `lk` leaves the divergence for the acceptance as the latter rises. Doubled, it does at half the acceptance;
with the acceptance alone a drafter that begins far away does not move."""
DEPTH_DECAY = 0.8
"""Weight of a draft token's loss against that of the one before it (EAGLE-3, Medusa). Doubling it would weigh the last
token most, which is needed least often."""


@dataclass(frozen=True, slots=True)
class Law:
    """The target's law at M places, at temperature 1."""

    probs: Tensor
    """[M, W] float32, of the ids that the drafter can say: below 1 in sum where these are not all."""
    entropy: Tensor
    """[M] float32, the part of those ids: minus the sum of probs times their logarithms, nats."""

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor | None) -> Law:
        """Take the target's logits [M, V] and the drafter's ids [W] int64, None for all."""
        log_probs = log_softmax(logits.float(), dim=-1)
        if ids is not None:
            log_probs = log_probs[:, ids]
        probs = log_probs.exp()
        return cls(probs, -(probs * log_probs).sum(dim=-1))

    def at(self, rows: Tensor) -> Law:
        """Return the laws of some rows [N] int64."""
        return Law(self.probs[rows], self.entropy[rows])


def acceptance(law: Law, log_draft: Tensor) -> Tensor:
    """Return [M], the probability that a token drawn from the draft's law is kept: the sum of min(target, draft).

    log_draft: the draft's log-probs [M, W]. Leviathan et al. 2023, Corollary 3.6.
    """
    return torch.minimum(law.probs, log_draft.exp()).sum(dim=-1)


def divergence(law: Law, log_draft: Tensor) -> Tensor:
    """Return [M], KL(target || draft) over the draft's ids, nats. log_draft: the draft's log-probs [M, W]."""
    return -law.entropy - (law.probs * log_draft).sum(dim=-1)


def loss_of(name: LossName, law: Law, logits: Tensor) -> Tensor:
    """Return the mean loss over M >= 1 places of a draft's logits [M, W].

    kl: the divergence. lk: weight * divergence + (1 - weight) * TV, where TV is 1 - acceptance and weight
    exp(-LK_DECAY * mean acceptance), taken as a constant: the divergence leads while little is accepted, and the
    acceptance itself is maximised later on (2602.23881).
    """
    log_draft = log_softmax(logits.float(), dim=-1)
    divergences = divergence(law, log_draft).mean()
    if name == "kl":
        return divergences
    accepted = acceptance(law, log_draft).mean()
    weight = math.exp(-LK_DECAY * float(accepted.detach()))
    return weight * divergences + (1.0 - weight) * (1.0 - accepted)
