"""That the tests of the law can fail: exact laws of the broken rules, and the power of the chi-square against them."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.law.cases import CASE, CASES, NUM_ANSWERS, NUM_EVERYDAY, PROMPT, TOPK
from tests.law.chi_square import first_three, p_value, power, seen_through
from tests.law.expected import Conditionals, Law, conditionals, joint
from tests.law.rounds import Rule, forgetful, noise_shared, output_law, residual_skipped, sound, truncated_after_draw
from tests.law.services import Models
from tests.law.test_law import BROKEN, threshold

PARAMS = CASE["full: nothing"].params
K = 3
EVERYDAY = threshold(CASES)
RULES = {
    "residual skipped": (residual_skipped, "full"),
    "truncated after the draw": (truncated_after_draw(TOPK), "topk"),
    "noise shared": (noise_shared, "full"),
}
"""Broken ones, each with a group of cases that it breaks."""


@pytest.fixture(scope="module")
def laws(models: Models) -> tuple[Conditionals, Conditionals]:
    """Target's and draft's."""
    return conditionals(models.target, PROMPT, PARAMS), conditionals(models.draft, PROMPT, PARAMS)


def broken_law(laws: tuple[Conditionals, Conditionals], rule: Rule) -> Law:
    found = output_law(*laws, rule, K, PARAMS.max_tokens)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return found


def test_the_sound_rule_has_the_targets_law(laws: tuple[Conditionals, Conditionals]) -> None:
    found, expected = broken_law(laws, sound), joint(laws[0], PARAMS.max_tokens)
    assert found.keys() == expected.keys()
    assert max(abs(found[answer] - expected[answer]) for answer in expected) < 1e-15


@pytest.mark.parametrize("name", RULES)
def test_the_sample_is_large_enough(laws: tuple[Conditionals, Conditionals], name: str) -> None:
    """That a broken rule passes one case has a chance below one in a thousand."""
    assumed = seen_through(joint(laws[0], PARAMS.max_tokens), first_three)
    assert power(seen_through(broken_law(laws, RULES[name][0]), first_three), assumed, NUM_ANSWERS, BROKEN) > 0.999


@pytest.mark.parametrize("name", RULES)
def test_a_day_is_large_enough(models: Models, name: str) -> None:
    """That a broken rule passes all everyday cases of its group, whose samples are independent, has one below 3 %."""
    rule, group = RULES[name]
    passes = list[float]()
    for params in (case.params for case in CASES if case.group == group):
        target, draft = (conditionals(path, PROMPT, params) for path in (models.target, models.draft))
        actual = seen_through(output_law(target, draft, rule, K, params.max_tokens), first_three)
        assumed = seen_through(joint(target, params.max_tokens), first_three)
        passes.append(1.0 - power(actual, assumed, NUM_EVERYDAY, EVERYDAY))
    assert math.prod(passes) < 0.03


def test_the_sample_is_large_enough_for_frozen_penalties(models: Models) -> None:
    params = CASE["full: repeated drafts"].params
    target, draft = (conditionals(path, PROMPT, params) for path in (models.target, models.draft))
    expected = joint(target, params.max_tokens)
    free = conditionals(models.target, PROMPT, replace(params, frequency_penalty=0.0))
    believed = forgetful(free, params.frequency_penalty)
    actual = output_law(target, draft, sound, K, params.max_tokens, believed)
    assert sum(actual.values()) == pytest.approx(1.0, abs=1e-12)
    actual, expected = seen_through(actual, first_three), seen_through(expected, first_three)
    assert power(actual, expected, NUM_ANSWERS, BROKEN) > 0.999
    assert power(actual, expected, NUM_EVERYDAY, EVERYDAY) > 0.45, "the larger samples see what is missed"


def drawn(law: Law, num_answers: int, seed: int) -> Counter[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    cells, weights = list(law), torch.tensor(list(law.values()), dtype=torch.float64)
    return Counter(cells[i] for i in torch.multinomial(weights, num_answers, True, generator=generator).tolist())


def test_p_values_of_a_true_law_are_uniform(laws: tuple[Conditionals, Conditionals]) -> None:
    """Joined bins keep the chi-square approximation good: of 1,000 samples 1 % +- 1 % are below 0.01."""
    law = seen_through(joint(laws[0], PARAMS.max_tokens), first_three)
    found = [p_value(drawn(law, NUM_ANSWERS, seed), law) for seed in range(1000)]
    assert sum(p < 0.01 for p in found) <= 20
    assert sum(p < 0.5 for p in found) == pytest.approx(500, abs=60)


def test_an_impossible_answer_fails_alone(laws: tuple[Conditionals, Conditionals]) -> None:
    law = {(0,): 0.5, (1,): 0.5, (2,): 0.0}
    assert p_value(Counter({(0,): 1000, (1,): 1000}), law) == pytest.approx(1.0)
    assert p_value(Counter({(0,): 1000, (1,): 999, (2,): 1}), law) == 0.0
    assert p_value(Counter({(0,): 1000, (1,): 999, (3,): 1}), law) == 0.0
