"""The times of a round and of its parts, of pairs whose speed is known."""

import pytest

from outrider.lab.tuning.costs import costs_of
from outrider.wire.errors import ConfigError
from tests.unit.outrider.lab.tuning import simulated_pair
from tests.unit.outrider.lab.tuning.known_study import EVERY_K, pair_texts
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, PROMPT_S, one_pass, round_s


def test_costs_are_of_rounds_with_all_their_drafts() -> None:
    costs = costs_of({k: [one_pass(k, pair_texts(1))] for k in EVERY_K}, MAX_TOKENS)
    for k, cost in costs.by_k.items():
        assert cost.round_s == pytest.approx(round_s(k))
        assert cost.wait_s == pytest.approx(0.002 * k)
        assert cost.verify_s == pytest.approx(simulated_pair.verify_s(k))
        assert cost.rest_s == pytest.approx(0.002)
        assert cost.first_s == pytest.approx(PROMPT_S + round_s(k))
        assert cost.plain_share == 0.0
    assert costs.c == pytest.approx(0.002 / 0.020)


def test_outputs_that_are_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="no round had all drafts of K = 12 in 1 answers of 3 tokens"):
        costs_of({12: [one_pass(12, [[True] * 3])]}, MAX_TOKENS)
