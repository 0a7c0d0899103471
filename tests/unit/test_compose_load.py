"""How `make compose-test` judges the streams it saw; the containers themselves need an engine."""

from __future__ import annotations

import pytest

from tests.compose.checks import Report, judge, judge_drain, judge_ends, judge_stop
from tests.compose.load import Outcome
from tests.compose.streams import Answer


def answer(*times: float, error: str | None = None, text: str = "abc", refused_with: int | None = None) -> Answer:
    ended = times[-1] if times else 0.0
    return Answer(0, 0.0, ended, text, "length", list(times), error, refused_with)


def outcome(*answers: Answer) -> Outcome:
    return Outcome("target killed", 10.0, list(answers), [(10.5, 14.0)], settled=True)


def num_failed(found: Outcome, served_meanwhile: bool = False) -> int:
    report = Report()
    judge(found, report, {0: "abc"}, served_meanwhile)
    return report.num_failed


def test_a_pause_is_counted_from_the_fault_on() -> None:
    before, across, late = answer(1.0, 9.0), answer(9.0, 10.2, 17.5, 17.6), answer(9.9, 10.1, 10.4)
    found = outcome(before, across, late)
    assert found.hit() == [across, late]
    assert found.pauses() == pytest.approx([0.3, 7.3])
    assert found.without_drafts() == 4.0


def test_streams_that_go_on_pass() -> None:
    assert num_failed(outcome(answer(9.0, 17.0)), served_meanwhile=True) == 0


@pytest.mark.parametrize(
    "broken",
    [answer(9.0, 17.0, error="lost"), answer(9.0, 17.0, text="abx")],
    ids=["it ended in an error", "another text"],
)
def test_a_stream_that_was_hit_and_hurt_fails(broken: Answer) -> None:
    assert num_failed(outcome(answer(9.0, 17.0), broken)) == 1 + (broken.error is not None)


def test_only_refusals_at_the_door_are_excused_and_only_where_nobody_can_serve() -> None:
    refused = answer(error="503: no target", refused_with=503)
    assert num_failed(outcome(answer(9.0, 17.0), refused)) == 0
    assert num_failed(outcome(answer(9.0, 17.0), refused), served_meanwhile=True) == 1
    assert num_failed(outcome(answer(9.0, 17.0), answer(error="500: x", refused_with=500))) == 1


def test_a_fault_that_hit_no_stream_proves_nothing() -> None:
    assert num_failed(outcome(answer(1.0, 9.0))) == 1


@pytest.mark.parametrize(
    ("answers", "exit_codes"),
    [
        ([answer(1.0, 9.0)], {"gateway": 0}),
        ([answer(9.0, 17.0, error="the gateway is stopping")], {"gateway": 0}),
        ([answer(9.0, 17.0, text="ab")], {"gateway": 0}),
        ([answer(9.0, 17.0), answer(11.0, 17.0, error="ended by None")], {"gateway": 0}),
        ([answer(9.0, 17.0)], {"gateway": 0, "target": 137}),
    ],
    ids=[
        "no stream was under way",
        "one ended in an error",
        "one is short",
        "a later one was cut off",
        "one was killed",
    ],
)
def test_a_stop_that_hurts_fails(answers: list[Answer], exit_codes: dict[str, int]) -> None:
    report = Report()
    judge_stop(outcome(*answers), report, {0: "abc"}, exit_codes)
    assert report.num_failed == 1


def test_a_stop_that_lets_streams_end_passes() -> None:
    report = Report()
    refused = answer(error="ConnectError('All connection attempts failed')")
    judge_stop(outcome(answer(9.0, 17.0), refused), report, {0: "abc"}, {"gateway": 0, "target": 0})
    assert (report.num_failed, report.num_checks) == (0, 3)


def test_a_stopped_target_waits_for_its_streams() -> None:
    report = Report()
    judge_drain(outcome(answer(9.0, 17.0)), report, stopped_at=17.5)
    assert report.num_failed == 0
    judge_drain(outcome(answer(9.0, 12.0), answer(9.0, 17.0)), report, stopped_at=13.0)
    assert report.num_failed == 1


def test_a_stream_that_is_cut_off_ends_in_one_error_and_the_next_is_answered() -> None:
    report = Report()
    judge_ends(outcome(answer(9.0, 12.0, error="cut", text="ab"), later(20.0)), report, {0: "abc"})
    assert report.num_failed == 0


@pytest.mark.parametrize(
    "answers",
    [
        [answer(9.0, 12.0, error="cut", text="ax"), "whole"],
        [answer(9.0, 12.0, text="ab"), "whole"],
        [answer(9.0, 12.0, error="cut", text="ab")],
        [answer(1.0, 9.0)],
    ],
    ids=["a wrong token before the error", "short without an error", "nobody is answered again", "no stream was hit"],
)
def test_a_part_that_does_not_come_back_or_hurts_fails(answers: list[Answer | str]) -> None:
    report = Report()
    judge_ends(outcome(*(later(20.0) if isinstance(one, str) else one for one in answers)), report, {0: "abc"})
    assert report.num_failed == 1


def later(started: float) -> Answer:
    return Answer(0, started, started + 5, "abc", "length", [started + 1, started + 5])
