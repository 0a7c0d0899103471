"""When a worker that has work and says nothing counts as hung."""

from outrider.wire.transport.hang_watch import HangWatch


def test_steps_or_answers_are_signs_of_life() -> None:
    watch = HangWatch(4.0, 30.0, now=0.0)
    watch.note_step(1, 0.1, now=1.0)
    assert not watch.is_hung(last_reply_s=0.0, now=4.9)
    assert watch.is_hung(last_reply_s=0.0, now=5.0)
    assert not watch.is_hung(last_reply_s=3.0, now=5.0), "it answered somebody"
    watch.note_step(2, 0.1, now=5.0)
    assert not watch.is_hung(last_reply_s=0.0, now=8.9), "a long prompt: no answers, but steps"
    watch.note_step(2, 0.1, now=9.0)
    assert watch.is_hung(last_reply_s=0.0, now=9.0), "GetInfo answers, the engine does not"


def test_time_without_work_does_not_count() -> None:
    watch = HangWatch(4.0, 30.0, now=0.0)
    watch.note_step(1, 0.1, now=0.0)
    watch.idle(now=100.0)
    assert not watch.is_hung(last_reply_s=0.0, now=103.9)
    assert watch.is_hung(last_reply_s=0.0, now=104.0)


def test_a_worker_of_long_steps_is_given_more_time_but_not_for_ever() -> None:
    watch = HangWatch(4.0, 30.0, now=0.0)
    assert watch.limit_s == 30.0, "nothing is known of its steps"
    for longest_s, limit_s in ((0.01, 4.0), (0.5, 4.0), (2.0, 16.0), (10.0, 30.0)):
        watch.note_step(1, longest_s, now=0.0)
        assert watch.limit_s == limit_s
    assert HangWatch(4.0, 2.0, now=0.0).limit_s == 2.0
