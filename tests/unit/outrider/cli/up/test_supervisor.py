"""Parts that are started again: later each time, and no more when they end at once every time."""

from outrider.cli.up.restarts import DELAYS_S, STEADY_S, Restarts


def test_short_lives_are_followed_later_each_time_and_then_no_more() -> None:
    starts: list[float] = []
    now_s = 100.0
    part = Restarts(lambda: starts.append(now_s))
    for index, delay_s in enumerate(DELAYS_S):
        part.ready(now_s)
        assert part.ended(now_s)
        part.start_if_due(now_s + delay_s - 0.01)
        assert len(starts) == index
        now_s += delay_s
        part.start_if_due(now_s)
        part.start_if_due(now_s + 1)
        assert starts[index:] == [now_s]
    assert not part.ended(now_s)
    part.start_if_due(now_s + 1000)
    assert len(starts) == len(DELAYS_S)


def test_a_long_life_forgets_the_short_ones_before_it_but_only_if_it_was_ready() -> None:
    part = Restarts(lambda: None)
    for _ in DELAYS_S:
        assert part.ended(0.0)
    part.ready(10.0)
    assert part.ended(10.0 + STEADY_S)
    assert part.num_short == 1
    assert part.ended(1000.0)  # it was started, and never ready
    assert part.num_short == 2
