"""Losses of drafters, by hand."""

import math

import pytest
import torch

from outrider.training.losses import TargetDistribution, acceptance, divergence, loss_of

LAW = torch.tensor([[0.75, 0.25]]).log()
EVEN = torch.tensor([[0.0, 0.0]])


def test_losses_by_hand() -> None:
    law, log_even = TargetDistribution.of(LAW, None), EVEN.log_softmax(-1)
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(law, log_even).item() == pytest.approx(kl)
    assert divergence(law, LAW).item() == pytest.approx(0.0, abs=1e-6)
    assert acceptance(law, log_even).item() == pytest.approx(0.75)
    assert loss_of("kl", law, EVEN).item() == pytest.approx(kl)
    weight = math.exp(-3 * 0.75)
    assert loss_of("lk", law, EVEN).item() == pytest.approx(weight * kl + (1 - weight) * 0.25)


def test_the_weight_of_lk_is_a_constant_to_its_gradient() -> None:
    """KL and TV have the same gradient here, -1/4 for the first logit, and so has every mixture of them."""
    logits = EVEN.clone().requires_grad_(True)
    loss_of("lk", TargetDistribution.of(LAW, None), logits).backward()
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([-0.25, 0.25])


def test_ids_outside_a_head_s_vocabulary_are_never_accepted() -> None:
    law = TargetDistribution.of(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0, 2]))
    log_draft = torch.tensor([[0.6, 0.4]]).log()
    assert acceptance(law, log_draft).item() == pytest.approx(0.5 + 0.2)
    assert divergence(law, log_draft).item() == pytest.approx(0.5 * math.log(0.5 / 0.6) + 0.2 * math.log(0.2 / 0.4))
