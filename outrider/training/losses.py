"""Losses that compare a drafter's logits with the target's distributions at the same positions.

Used by `run` to train and by `measure`, which reports acceptance.
"""

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
"""Rate at which the weight of the KL divergence in the loss `lk` falls as draft tokens are accepted more often (arXiv
2602.23881): the weight is exp(-LK_DECAY * mean acceptance probability). Without the divergence, a student that begins
far from the target does not improve."""
DEPTH_DECAY = 0.8
"""Factor between the weights of the losses of consecutive draft tokens of a round: the loss of draft token k, counted
from 0, has the weight DEPTH_DECAY ** k (EAGLE-3, Medusa)."""


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """The target's next-token distributions at M positions, at temperature 1, restricted to the W token ids that the
    student can propose.
    """

    probs: Tensor
    """Probabilities [M, W] float32. A row sums to less than 1 if the student can propose only some of the target's
    token ids."""
    entropy: Tensor
    """Entropy at each position, [M] float32, in nats: minus the sum of probs * log(probs) over the W token ids."""

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor | None) -> TargetDistribution:
        """Return the distributions for the target's logits [M, V]. ids: token ids [W] int64 that the student can
        propose; None = all V.
        """
        log_probs = log_softmax(logits.float(), dim=-1)  # [M, V] float32
        if ids is not None:
            log_probs = log_probs[:, ids]  # [M, W] float32
        probs = log_probs.exp()
        return cls(probs, -(probs * log_probs).sum(dim=-1))

    def at(self, rows: Tensor) -> TargetDistribution:
        """Return the distributions of N of the M positions. rows: indices of these positions, [N] int64."""
        return TargetDistribution(self.probs[rows], self.entropy[rows])


def acceptance(target: TargetDistribution, log_draft: Tensor) -> Tensor:
    """Return, for each of M positions, the probability that a token drawn from the student's distribution is accepted:
    [M] float32.

    It is the sum of min(target, student) over the W token ids (Leviathan et al. 2023, Corollary 3.6). log_draft: the
    student's log-probs, [M, W] float32.
    """
    return torch.minimum(target.probs, log_draft.exp()).sum(dim=-1)


def divergence(target: TargetDistribution, log_draft: Tensor) -> Tensor:
    """Return the divergence KL(target || student) at each of M positions, [M] float32, in nats, summed over the W token
    ids that the student can propose. log_draft: the student's log-probs, [M, W] float32.
    """
    return -target.entropy - (target.probs * log_draft).sum(dim=-1)


def loss_of(name: LossName, target: TargetDistribution, logits: Tensor) -> Tensor:
    """Return the mean loss over M >= 1 positions, [] float32. logits: the student's logits, [M, W].

    name: "kl" = `divergence`. "lk" = weight * divergence + (1 - weight) * (1 - acceptance), where weight is
    exp(-LK_DECAY * mean acceptance) and passes no gradient (arXiv 2602.23881). So the divergence dominates while little
    is accepted, and the acceptance itself dominates later.
    """
    log_draft = log_softmax(logits.float(), dim=-1)  # [M, W] float32
    mean_divergence = divergence(target, log_draft).mean()  # []
    if name == "kl":
        return mean_divergence
    mean_acceptance = acceptance(target, log_draft).mean()  # []
    weight = math.exp(-LK_DECAY * float(mean_acceptance.detach()))
    return weight * mean_divergence + (1.0 - weight) * (1.0 - mean_acceptance)
