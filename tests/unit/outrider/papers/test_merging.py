"""Several drafters in one tree: what the budget is offered of each, and that what is accepted of all has the target's
law.

The law by enumeration of every draw that the real functions make, as in `test_growing_tree.py`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outrider.wire.requests.params import SamplingParams
from target_service.drafting.budget import VerifyBudget
from target_service.step.verdicts import drafter_of
from tests.enumeration import Chooser, Law, Numbers, Prefix, every_draw, every_run, random_law
from tests.unit.outrider.engine.speculation.test_growing_tree import NUM_TOKENS, TOLERANCE, decided, joint
from tests.unit.target_service.drafting.unions import PROMPT, UNION, Token, guesses, made, park, proposal_of

__all__ = ["every_draw"]
VOCAB = 3
DRAWN = SamplingParams(temperature=1.0)
Ends = Callable[[Prefix], bool]


TARGET, DRAFT, OWN = random_law(VOCAB, 1), random_law(VOCAB, 2), random_law(VOCAB, 3)


def never(prefix: Prefix) -> bool:
    return False


def at_zero(prefix: Prefix) -> bool:
    return prefix[-1] == 0


def at_its_second(prefix: Prefix) -> bool:
    return len(prefix) == 2 and prefix[-1] == 0


class TestExactLaw:
    """Under `rejection`."""

    @pytest.fixture(autouse=True)
    def _drawn(self, every_draw: None) -> None:
        pass

    def step(
        self, target: Law, laws: Sequence[Law], count: int, ends: Ends, chances: Sequence[float], chooser: Chooser
    ) -> Prefix:
        """A step's output that verifies `count` of what two sources draw: two drafts, and up to three beside them."""
        numbers = Numbers(chooser)
        own = self.drawn(laws[1], [numbers["own draft", depth] for depth in range(min(3, count - 1))], ends)
        drafting, lease = made(DRAWN, own, chances, num_draft_tokens="auto", max_draft_tokens=5)
        lease.slot.max_len = len(PROMPT) + 4
        park(lease.first, self.drawn(laws[0], [numbers["draft", depth] for depth in range(2)], never))
        proposal = proposal_of(drafting, drafting.candidates(lease), count)
        assert drafter_of(proposal) is UNION
        return decided(target, proposal, numbers)

    def drawn(self, law: Law, numbers: Sequence[Any], ends: Ends) -> list[Token]:
        found, prefix = list[Token](), Prefix()
        for number in numbers:
            if prefix and ends(prefix):
                break
            of_prefix: Any = law(prefix)
            found.append((of_prefix.draw(number), of_prefix))
            prefix = (*prefix, found[-1][0])
        return found

    def error_of(self, target: Law, laws: Sequence[Law], count: int, ends: Ends, chances: Sequence[float]) -> float:
        return self.error(lambda chooser: self.step(target, laws, count, ends, chances, chooser), target)

    def error(self, step: Callable[[Chooser], Prefix], target: Law) -> float:
        total = np.zeros((VOCAB,) * NUM_TOKENS)
        for weight, output in every_run(step):
            for rest in itertools.product(range(VOCAB), repeat=max(0, NUM_TOKENS - len(output))):
                whole, share = (*output, *rest)[:NUM_TOKENS], weight
                for i in range(len(output), NUM_TOKENS):
                    share *= target(whole[:i]).prob(whole[i])
                total[whole] += share
        assert total.sum() == pytest.approx(1.0, abs=TOLERANCE)
        return float(np.abs(total - joint(target, VOCAB)).max())

    @pytest.mark.parametrize("ends", [never, at_its_second], ids=["long", "ended by a value"])
    @pytest.mark.parametrize("chances", [(0.5, 0.8), (0.3, 0.95)], ids=["draft first", "own first"])
    def test_whatever_is_chosen_of_each(self, chances: Sequence[float], ends: Ends) -> None:
        num_first = 2 if chances[0] > 0.4 else 4
        for count in range(num_first, 6):
            assert self.error_of(TARGET, (DRAFT, OWN), count, ends, chances) < TOLERANCE, count

    @pytest.mark.parametrize(
        "laws",
        [
            (random_law(VOCAB, 2, [1]), random_law(VOCAB, 3, [1])),
            (random_law(VOCAB, 2, [0, 1]), random_law(VOCAB, 3, [2])),
            (random_law(VOCAB, 2), random_law(VOCAB, 2)),
            (random_law(VOCAB, 1), random_law(VOCAB, 3)),
        ],
        ids=["always the same", "never the same", "one law", "the target's own"],
    )
    def test_any_tokens_of_two_drafters(self, laws: Sequence[Law]) -> None:
        chances = (0.5, 0.8)
        for target in (TARGET, random_law(VOCAB, 4, [0, 1])):
            for count in (2, 5):
                assert self.error_of(target, laws, count, never, chances) < TOLERANCE, count

    def test_a_deterministic_token_among_draws_may_depend_on_the_numbers_of_its_position(self) -> None:
        """As a copy of what the same seed gave before."""

        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            copied = self.drawn(TARGET, [numbers["own", place] for place in range(2)], never)
            own = guesses(*(token_id for token_id, _ in copied))
            drafting, lease = made(DRAWN, own)
            park(lease.first, self.drawn(DRAFT, [numbers["draft", depth] for depth in range(2)], never))
            found = drafting.candidates(lease)
            return decided(TARGET, proposal_of(drafting, found, len(found.budget_items)), numbers)

        assert self.error(step, TARGET) < TOLERANCE

    @pytest.mark.parametrize(
        "laws",
        [(DRAFT, OWN), (DRAFT, DRAFT), (random_law(VOCAB, 2, [1]), OWN), (random_law(VOCAB, 2, [0]), TARGET)],
        ids=["two laws", "one law", "always the same", "the target's own"],
    )
    @pytest.mark.parametrize("chances", [(0.5, 0.8, 0.5), (0.3, 0.95, 0.5)], ids=["first first", "second first"])
    def test_whatever_two_drafts_deliver(self, laws: Sequence[Law], chances: Sequence[float]) -> None:
        """Of which the second has a draw more, unless it ends with its first, and so many are verified."""

        def step(count: int, chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            drafting, lease = made(DRAWN, [], chances)
            for place, (draft, law) in enumerate(zip(lease.drafts, laws, strict=True)):
                drawn = self.drawn(law, [numbers[f"draft {place}", depth] for depth in range(1 + place)], at_zero)
                park(draft, drawn)
            return decided(TARGET, proposal_of(drafting, drafting.candidates(lease), count), numbers)

        for count in range(1, 5):
            assert self.error(lambda chooser, count=count: step(count, chooser), TARGET) < TOLERANCE, count

    @pytest.mark.parametrize("is_live", [True, False], ids=["waited for", "late before"])
    def test_a_draw_of_the_second_does_not_decide_whether_the_first_is_waited_for(self, is_live: bool) -> None:
        """A table has said its last behind one of them: what comes of the first meanwhile is in the step, or is not."""
        was_held = list[bool]()

        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            drafting, lease = made(DRAWN, [], (0.6, 0.5, 0.5), num_draft_tokens="auto" if is_live else 2)
            (second,) = chain = self.drawn(OWN, [numbers["second", 0]], never)
            park(lease.drafts[1], chain)
            lease.drafts[1].buffer.ended = set() if second[0] else {0}
            for draft in lease.drafts:
                draft.eta_s = draft.gap_s = 0.01
            lease.begin_step(0.0)
            lease.first.is_active, budget = is_live, VerifyBudget()
            for _ in range(60):
                budget.note(1, 1, 1 / 45)
            found = drafting.candidates(lease)
            awaited = drafting.pending(found)
            was_held.append(bool(awaited) and (not is_live or budget.hold_until(awaited, 0.001) is not None))
            if was_held[-1]:
                lease.held_from_s = 0.0
                park(lease.first, self.drawn(DRAFT, [numbers["first", 0]], never))
                lease.first.is_active = True
                found = drafting.candidates(lease)
            return decided(TARGET, proposal_of(drafting, found, len(found.budget_items)), numbers)

        assert self.error(step, TARGET) < TOLERANCE
        assert len(set(was_held)) == (1 if is_live else 2)

    def test_three_sources(self) -> None:
        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            laws = (DRAFT, OWN, random_law(VOCAB, 5))
            chains = [self.drawn(law, [numbers[str(place), 0]], never) for place, law in enumerate(laws)]
            drafting, lease = made(DRAWN, chains[2], (0.5, 0.4, 0.3), num_draft_tokens=1)
            for draft, chain in zip(lease.drafts, chains, strict=False):
                park(draft, chain)
            found = drafting.candidates(lease)
            assert len(found.budget_items) == 3
            return decided(TARGET, proposal_of(drafting, found, 3), numbers)

        assert self.error(step, TARGET) < TOLERANCE

    def test_two_sources_keep_more_than_either(self) -> None:
        def mean(count: int, laws: Sequence[Law]) -> float:
            chances = (0.5, 0.8)
            runs = every_run(lambda chooser: self.step(TARGET, laws, count, never, chances, chooser))
            return sum(weight * min(2, len(output)) for weight, output in runs)

        both = mean(2, (DRAFT, OWN))
        for law in (DRAFT, OWN):
            alone = 1.0 + sum(min(TARGET(()).prob(i), law(()).prob(i)) for i in range(VOCAB))
            assert both > alone + 1e-3
