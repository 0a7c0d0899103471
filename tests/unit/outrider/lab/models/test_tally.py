"""What is counted of a drafter, token by token: its acceptance and the error of that."""

import math

import numpy as np
import pytest

from outrider.engine.sampling.token_distribution import TokenDistribution, one_hot
from outrider.lab.models.tally import Estimate, Tally, TargetToken
from outrider.wire.requests.params import SamplingParams


def test_tokens_of_one_prompt_are_not_independent() -> None:
    """Ten prompts that say all yes or all no are ten facts, however many tokens they have."""
    few, many = ([[float(i < 5)] * n for i in range(10)] for n in (1, 100))
    assert Estimate.of(few).mean == Estimate.of(many).mean == 0.5
    assert Estimate.of(few).error == pytest.approx(Estimate.of(many).error)
    assert Estimate.of(few).error == pytest.approx(1.96 * math.sqrt(0.25 / 9))
    assert Estimate.of([[1.0, 0.0] * 50] * 10).error == 0.0


def test_lenience_accepts_as_in_the_paper() -> None:
    """A.5: above temperature 0 the sum of min(target / lenience, draft); at 0 what is nearly as likely as the best."""
    target, draft = law(0.5, 0.3, 0.2), law(0.2, 0.7, 0.1)
    tally = Tally([1.0], [1.0, 0.5, 0.1])
    tally.begin()
    tally.add(TargetToken(0, 1, target, target), lambda params: draft, SamplingParams(temperature=1.0))
    kept = [each["mean"] for each in tally.row("", {})["lenient"]]
    assert kept == pytest.approx([0.2 + 0.3 + 0.1, 0.2 + 0.6 + 0.1, 1.0])
    greedy = TargetToken(0, 1, one_hot(0, 3), target)
    assert [greedy.keeps(1, lenience) for lenience in (1.0, 0.61, 0.59)] == [False, False, True]
    assert greedy.keeps(0, 1.0) and not greedy.keeps(2, 0.5)


def law(*probs: float) -> TokenDistribution:
    return TokenDistribution(len(probs), np.log(np.array(probs, dtype=np.float32)))
