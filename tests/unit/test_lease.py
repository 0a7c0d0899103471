"""What a slot that steps by itself learns of how long its guesses take, with scripted times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.engine.speculation.nodes import TREE_ROOT, NodeKind, Nodes
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.wire.kinds import Drafter
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation
from target_service.drafts import Drafts
from target_service.jobs import Fallback
from target_service.lease import ETA_WEIGHT, MOST_LACKED, Candidate, Delivered, Lease, Ready, Scaffold, Source
from target_service.own_drafts import OwnDrafts
from target_service.parked import ParkedNode
from target_service.step_rows import Decided

PROMPT = [7, 8, 9]


class Course:
    """A slot whose target commits a token a step, at times that the test says."""

    def __init__(self) -> None:
        params = SamplingParams(temperature=0.0)
        slot: Any = SimpleNamespace(committed=list(PROMPT), max_len=99, params=params)
        shares = SlotShares(RankShares())
        job: Any = None
        self.draft = Delivered(1, shares, live=True)
        self.lease = Lease(job, slot, Speculation(max_draft_tokens=8), 99, [self.draft], {}, 0.0)
        self.lease.goes_on(0.0)

    def step(self, now: float) -> None:
        """A plain step ends, which commits token 1."""
        self.lease.slot.committed.append(1)
        self.draft.parked.advance([1], len(self.lease.slot.committed) - 1, None)
        self.lease.goes_on(now)

    def deliver(self, root_len: int, now: float) -> None:
        """Guesses of one token after the other come, under the first root_len tokens."""
        nodes = Nodes(1, root_len, [1, 1], [TREE_ROOT, 0], [0, 0], [NodeKind.GUESS] * 2, None)
        self.draft.parked.insert(nodes, self.lease.slot.committed, 1 << 20)
        self.draft.arrived(root_len, now)


def test_guesses_that_come_late_teach_how_long_they_take() -> None:
    """Else a target that is faster than its draft never learns that it might have waited."""
    course = Course()
    for now in (1.0, 2.0, 3.0):
        course.step(now)
    course.deliver(4, 3.5)  # for the length at which the slot could go on at 1.0
    assert course.draft.eta_s == pytest.approx(2.5)
    assert 6 in course.draft.lacked, "it is over: what the slot lacks now is still to come"
    course.deliver(6, 3.75)  # for now: since 3.0
    assert course.draft.eta_s == pytest.approx(2.5 + ETA_WEIGHT * (0.75 - 2.5))
    assert 6 not in course.draft.lacked


def test_a_length_is_learnt_from_once_and_none_where_nothing_lacked() -> None:
    course = Course()
    course.deliver(3, 0.25)
    course.deliver(3, 9.0)
    assert course.draft.eta_s == 0.25
    course.step(10.0)
    assert course.draft.is_ready, "the second guess is here, and is right"
    course.deliver(4, 11.0)
    assert course.draft.eta_s == 0.25


def test_lengths_that_nothing_ever_came_for_are_forgotten() -> None:
    course = Course()
    for index in range(MOST_LACKED + 4):
        course.step(1.0 + index)
    assert len(course.draft.lacked) == MOST_LACKED
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
    course.draft.live = False
    course.step(1.0)
    course.deliver(1, 2.0)
    assert course.draft.live and course.draft.heard and course.draft.eta_s is None


def test_a_prediction_is_learnt_from_whether_it_was_verified_or_not() -> None:
    """Else texts of no use would have the next one never tried."""
    course, shares, metrics = Course(), RankShares(), WorkerMetrics("target")
    for _ in range(500):
        shares.note(None)
    lease, none = course.lease, OwnDrafts({}, 9)
    prediction = lease.own_shares[Drafter.PREDICTION] = SlotShares(shares)
    assert prediction.share(0) < 0.02
    drafts = Drafts(none, cast(Any, None), metrics, 9, takes_trees=True)
    for _ in range(32):
        lease.slot.committed.append(1)
        drafts.committed(lease, Ready(lease.slot, [], None), Decided((), 1), [1], [True], 0.0)
    assert prediction.share(0) > 0.7


def test_a_scaffold_of_which_a_step_has_no_drafts_is_worth_less() -> None:
    """Else one that never brings anything would be paid for in every step."""
    course = Course()
    course.lease.job = cast(Any, SimpleNamespace(tickets=[(1, False)]))
    own = course.lease.own_shares[Drafter.LOOKAHEAD] = SlotShares(RankShares())
    scaffold = Scaffold(Drafter.LOOKAHEAD, [5], [-1], 1, width=2, depth=3)
    drafts, before = Drafts(OwnDrafts({}, 9), cast(Any, None), WorkerMetrics("target"), 9, True), scaffold.gain(own)
    sources = [Source(Drafter.LOOKAHEAD, {0: 0})]
    brought = Ready(course.lease.slot, [1], None, drafter=Drafter.LOOKAHEAD, scaffold=scaffold, sources=sources)
    drafts.committed(course.lease, brought, Decided((0,), 2), [1, 2], [], 0.0)
    assert scaffold.gain(own) > before
    for _ in range(32):
        plain = Ready(course.lease.slot, [], None, scaffold=scaffold)
        drafts.committed(course.lease, plain, Decided((), 1), [1], [], 0.0)
    assert scaffold.gain(own) < 0.3


@pytest.mark.parametrize(
    ("speculation", "is_held", "is_here", "is_passed_over", "expected"),
    [
        ({}, False, False, False, None),
        ({}, False, False, True, Fallback.DOES_NOT_PAY),
        ({}, False, True, False, Fallback.DOES_NOT_PAY),
        ({"num_draft_tokens": 3}, True, False, False, Fallback.LATE),
    ],
)
def test_a_plain_step_says_whether_drafts_did_not_pay(
    speculation: dict[str, int], is_held: bool, is_here: bool, is_passed_over: bool, expected: Fallback | None
) -> None:
    course = Course()
    lease = course.lease
    lease.speculation = Speculation(max_draft_tokens=8, **speculation)
    lease.held_from_s = 0.5 if is_held else None
    lease.is_passed_over = is_passed_over
    drafts = Drafts(OwnDrafts({}, 9), cast(Any, None), WorkerMetrics("target"), 9, takes_trees=True)
    assert drafts.fallback(lease, is_here=is_here) is expected
    course.step(1.0)
    assert not lease.is_passed_over, "the next step is another"


class _Saying:
    """A slot's own drafters: the first two speak, and the grammar masks what the first says."""

    def asked(self, slot: Any, *, insists: bool, is_drafted: bool) -> Any:
        yield from (Drafter.NGRAM, Drafter.LOOKUP)

    def candidates(self, slot: Any, kind: Drafter, *rest: Any) -> list[Candidate]:
        return [] if kind is Drafter.NGRAM else [(0.5, ParkedNode(3), -1)]


def under_a_grammar(own: Any, forced: list[int], **speculation: Any) -> tuple[Drafts, Lease]:
    course = Course()
    lease = course.lease
    lease.job, lease.slot.key = cast(Any, SimpleNamespace(tickets=[(1, True)])), (1, 1)
    lease.slot.params = SamplingParams(temperature=0.0, grammar="{}")
    lease.speculation = Speculation(**{"max_draft_tokens": 8, **speculation})
    lease.own_shares = {kind: SlotShares(RankShares()) for kind in (Drafter.NGRAM, Drafter.LOOKUP)}
    keeper: Any = SimpleNamespace(sampling_state=lambda slot: SimpleNamespace(forced=lambda: forced))
    return Drafts(own, keeper, WorkerMetrics("target"), 9, takes_trees=True), lease


def test_where_a_grammar_masks_what_one_drafter_says_the_next_is_asked() -> None:
    drafts, lease = under_a_grammar(_Saying(), [])
    assert drafts.candidates(lease).drafter is Drafter.LOOKUP


def test_forced_tokens_are_no_reason_to_go_without_the_draft_that_a_request_names() -> None:
    """Once its wait is over they are better than nothing; under auto, and where they are all that it names, at once."""
    drafts, lease = under_a_grammar(OwnDrafts({}, 9), [5], num_draft_tokens=3)
    found = drafts.candidates(lease)
    assert not found.nodes and drafts.lacking(found) == [(lease.first, 1.0)]
    assert len(drafts.or_forced(found).nodes) == drafts.or_forced(found).must == 1
    for forced, speculation in (([5, 6, 7, 8], {"num_draft_tokens": 3}), ([5], {})):
        drafts, lease = under_a_grammar(OwnDrafts({}, 9), forced, **speculation)
        assert drafts.candidates(lease).drafter is None
