"""What a worker says of its steps."""

from __future__ import annotations

from outrider.engine.worker.engine_thread import MEMORY_S, StepTimes
from tests.unit.outrider.wire.telemetry.test_metrics import Clock


def test_a_long_step_is_remembered_for_a_while() -> None:
    clock = Clock()
    times = StepTimes(clock)
    assert times.longest_s == 0.0
    times.add(2.0)
    times.add(0.5)
    assert (times.num_steps, times.busy_s, times.longest_s) == (2, 2.5, 2.0)
    clock.now += MEMORY_S
    times.add(0.5)
    assert times.longest_s == 2.0, "the span before counts, too"
    clock.now += MEMORY_S
    times.add(0.25)
    assert times.longest_s == 0.5
    clock.now += 2 * MEMORY_S
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
    times.rest()
    assert times.current_s == 0.0
