"""What a slot that steps by itself learns of how long its guesses take, with scripted times."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.papers.merging import merge
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.draft_chooser import DraftChooser
from target_service.drafting.own_drafts import OwnDrafts
from target_service.leases.hold import PendingDraft
from target_service.leases.lease import ETA_WEIGHT, MAX_STARVED, Lease, SlotDrafter
from target_service.leases.lease_jobs import Fallback
from tests.unit.target_service.leases.course import Course


def test_late_draft_tokens_are_measured() -> None:
    """Else a target that is faster than its draft never learns that it might have waited."""
    course = Course()
    for now in (1.0, 2.0, 3.0):
        course.step(now)
    course.deliver(4, 3.5)  # for the length at which the slot could go on at 1.0
    assert course.draft.eta_s == pytest.approx(2.5)
    assert 6 in course.draft.starved_since_s, "it is over: what the slot lacks now is still to come"
    course.deliver(6, 3.75)  # for now: since 3.0
    assert course.draft.eta_s == pytest.approx(2.5 + ETA_WEIGHT * (0.75 - 2.5))
    assert 6 not in course.draft.starved_since_s


def test_a_length_is_learnt_from_once_and_none_where_nothing_lacked() -> None:
    course = Course()
    course.deliver(3, 0.25)
    course.deliver(3, 9.0)
    assert course.draft.eta_s == 0.25
    course.step(10.0)
    assert course.draft.has_drafts, "the second guess is here, and is right"
    course.deliver(4, 11.0)
    assert course.draft.eta_s == 0.25


def test_lengths_that_nothing_ever_came_for_are_forgotten() -> None:
    course = Course()
    for index in range(MAX_STARVED + 4):
        course.step(1.0 + index)
    assert len(course.draft.starved_since_s) == MAX_STARVED
    course.deliver(4, 100.0)
    assert course.draft.eta_s is None


def test_a_clock_that_stands_still_is_no_time_before() -> None:
    course = Course()
    course.step(5.0)
    course.deliver(4, 4.9)  # noted by another thread
    assert course.draft.eta_s == 0.0


def test_whatever_comes_brings_hope() -> None:
    """That something came at all, late or for another length: it may be waited for again."""
    course = Course()
    course.draft.is_active = False
    course.step(1.0)
    course.deliver(1, 2.0)
    assert course.draft.is_active and course.draft.has_drafts is False and course.draft.eta_s is None


@pytest.mark.parametrize(
    ("speculation", "is_held", "is_here", "is_passed_over", "expected"),
    [
        ({}, False, False, False, None),
        ({}, False, False, True, Fallback.DOES_NOT_PAY),
        ({}, False, True, False, Fallback.DOES_NOT_PAY),
        ({"num_draft_tokens": 3}, True, False, False, Fallback.LATE),
    ],
)
def test_a_plain_step_reports_whether_drafts_were_not_worthwhile(
    speculation: dict[str, int], is_held: bool, is_here: bool, is_passed_over: bool, expected: Fallback | None
) -> None:
    course = Course()
    lease = course.lease
    lease.speculation = Speculation(max_draft_tokens=8, **speculation)
    lease.held_from_s = 0.5 if is_held else None
    lease.is_passed_over = is_passed_over
    assert drafting(OwnDrafts({})).fallback(lease, 0, is_left_out=is_here) is expected
    course.step(1.0)
    assert not lease.is_passed_over, "the next step is another"


def drafting(own: Any, keeper: Any = None) -> DraftChooser:
    return DraftChooser(own, keeper, cast(Any, None), WorkerMetrics("target"), 9, supports_trees=True, merge=merge)


class _TwoDrafters:
    """A slot's own drafters: both have something to propose, and the grammar masks what the first proposes."""

    def worthwhile_drafters(self, slot: Any, *, has_fixed_num: bool, is_drafted: bool) -> Any:
        yield from (Drafter.NGRAM, Drafter.LOOKUP)

    def max_len(self, drafter: Drafter) -> int:
        return 64

    def has_extra_rows(self, slot: Any) -> bool:
        return False

    def candidates(self, slot: Any, drafter: Drafter, *rest: Any) -> CandidateTree:
        ids = [] if drafter is Drafter.NGRAM else [3]
        return CandidateTree(DraftTree.of(ids, [-1] * len(ids)), [None] * len(ids), 0.5)


def under_a_grammar(own: Any, forced: list[int], **speculation: Any) -> tuple[DraftChooser, Lease]:
    course = Course()
    lease = course.lease
    lease.job, lease.slot.key = cast(Any, SimpleNamespace(tickets=[(1, True)])), (1, 1)
    lease.slot.params = SamplingParams(temperature=0.0, grammar="{}")
    lease.speculation = Speculation(**{"max_draft_tokens": 8, **speculation})
    for drafter in (Drafter.NGRAM, Drafter.LOOKUP):
        lease.own_drafters[drafter] = SlotDrafter(drafter, SlotAcceptance(RankAcceptance()))
    keeper: Any = SimpleNamespace(sampling_state=lambda slot: SimpleNamespace(forced=lambda: forced))
    return drafting(own, keeper), lease


def test_where_a_grammar_masks_what_one_drafter_proposes_the_next_one_drafts() -> None:
    choice, lease = under_a_grammar(_TwoDrafters(), [])
    assert [slot_drafter.drafter for slot_drafter in choice.candidates(lease).trees] == [Drafter.LOOKUP]


def test_forced_tokens_are_no_reason_to_go_without_the_draft_that_a_request_names() -> None:
    """Once its wait is over they are better than nothing; under auto, and where they are all that it names, at once."""
    choice, lease = under_a_grammar(OwnDrafts({}), [5], num_draft_tokens=3)
    found = choice.candidates(lease)
    assert not found.budget_items and choice.pending(found) == [PendingDraft(lease, lease.first, 1.0)]
    assert len(choice.or_forced(found).budget_items) == 1
    for forced, speculation in (([5, 6, 7, 8], {"num_draft_tokens": 3}), ([5], {})):
        choice, lease = under_a_grammar(OwnDrafts({}), forced, **speculation)
        assert [slot_drafter.drafter for slot_drafter in choice.candidates(lease).trees] == [None]
