"""When a step waits for a guess."""

import pytest

from tests.unit.target_service.drafting.steps import budget, lease, pending


class TestHold:
    def test_a_step_waits_for_a_draft_token_that_is_worth_more_than_the_wait_and_no_longer(self) -> None:
        near = lease(now=0.0, eta_s=0.005)
        assert budget().hold_until([pending(near, 0.6)], 0.001) == pytest.approx(0.01)
        assert budget().hold_until([pending(near, 0.6)], 0.02) is None  # it does not come
        assert budget().hold_until([pending(lease(eta_s=0.05), 0.6)], 0.001) is None  # it takes too long
        assert budget(tokens_per_s=2500).hold_until([pending(near, 0.6)], 0.001) is None  # others would wait, too
        assert budget().hold_until([pending(lease(), 0.6)], 0.001) is None  # nobody knows when it will come

    def test_tokens_after_the_first_draft_token_count_as_long_as_they_are_worth_their_own_wait(self) -> None:
        lone, quick, slow = (lease(now=0.0, eta_s=0.007, gap_s=gap_s) for gap_s in (None, 0.0005, 0.005))
        assert budget(100).hold_until([pending(lone, 0.6)], 0.001) is None
        assert budget(100).hold_until([pending(slow, 0.6)], 0.001) is None
        assert budget(100).hold_until([pending(quick, 0.6)], 0.001) == pytest.approx(0.014)

    @pytest.mark.timeout(10)
    def test_draft_tokens_of_one_delivery_are_counted_to_the_end(self) -> None:
        together = lease(now=0.0, eta_s=0.007, gap_s=0.0)
        together.first.acceptance.first = 1.0
        assert budget(100).hold_until([pending(together, 1.0)], 0.001) == pytest.approx(0.014)
