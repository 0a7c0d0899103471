"""What a worker says of its steps, and what becomes of one whose engine cannot do what it was asked."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from outrider.engine.worker.engine_thread import MAX_CONSECUTIVE_FAULTS, PERIOD_S, EngineThread, StepTimes
from outrider.engine.worker.jobs import JobFault
from tests.unit.clock import Clock

POISON = "poison"


class Worker:
    """Steps once after each job that it has taken in."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self.waiting: list[Any] = []

    def handle(self, job: Any) -> None:
        if job.text == POISON:
            raise RuntimeError("no such thing")
        self.waiting.append(job)

    def step(self, now: float) -> bool:
        jobs, self.waiting = self.waiting, []
        for job in jobs:
            self.engine.answer(partial(job.respond, "done"))
        return bool(jobs)

    def next_wake(self) -> float | None:
        return None

    def fail_step(self, error: Exception) -> None:
        raise AssertionError("no step fails here")


def run(texts: list[str]) -> tuple[BaseException | None, list[Any]]:
    """Hand one job after the other to an engine; return what ended it, None for `stop`, and the answers."""
    answers: list[Any] = []

    def post(calls: list[Callable[[], None]]) -> None:
        for call in calls:
            call()

    engine = EngineThread(Worker, post)
    engine.start()
    for text in texts:
        engine.submit(SimpleNamespace(text=text, respond=answers.append))
    ended = engine.wait_ended(0.0 if texts.count(POISON) < MAX_CONSECUTIVE_FAULTS else 10.0)
    engine.stop(10)
    return ended, answers


def test_a_message_that_cannot_be_taken_in_is_answered_and_the_next_one_is_served() -> None:
    ended, (refused, served) = run([POISON, "fine"])
    assert ended is None and served == "done"
    assert (refused.fault, refused.message) == (
        JobFault.INTERNAL,
        "the worker failed to take the message in: no such thing",
    )


def test_a_worker_that_takes_nothing_in_any_more_ends() -> None:
    ended, answers = run([POISON] * MAX_CONSECUTIVE_FAULTS)
    assert isinstance(ended, RuntimeError)
    assert [answer.fault for answer in answers] == [JobFault.INTERNAL] * MAX_CONSECUTIVE_FAULTS


def test_a_long_step_is_remembered_for_a_while() -> None:
    clock = Clock()
    times = StepTimes(clock)
    assert times.longest_s == 0.0
    times.add(2.0)
    times.add(0.5)
    assert (times.num_steps, times.busy_s, times.longest_s) == (2, 2.5, 2.0)
    clock.now += PERIOD_S
    times.add(0.5)
    assert times.longest_s == 2.0, "the span before counts, too"
    clock.now += PERIOD_S
    times.add(0.25)
    assert times.longest_s == 0.5
    clock.now += 2 * PERIOD_S
    times.add(0.125)
    assert times.longest_s == 0.125, "nothing was heard for longer than is remembered"


def test_what_the_engine_is_at_grows_older_until_it_waits_for_work_or_begins_anew() -> None:
    clock = Clock()
    times = StepTimes(clock)
    assert times.current_s == 0.0
    times.begin()
    clock.now += 3.0
    assert times.current_s == 3.0
    times.begin()
    assert times.current_s == 0.0
    clock.now += 3.0
    times.begin_wait()
    assert times.current_s == 0.0
