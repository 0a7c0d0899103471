"""A few hundred of the inputs that `make fuzz` sends by the hundred thousand, to every proto handler of every part."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import campaigns, services
from tests.fuzz.campaigns import Tally


def test_workers_answer_rubbish_with_a_clear_status_and_keep_nothing(tmp_path: Path) -> None:
    with services.workers(tmp_path) as (target, draft):
        for worker in (target, draft):
            tally = Tally()
            campaigns.run(campaigns.control(worker, [target.address, "", "\0"], tally), tally, 120, seed=3)
            assert {"reply open", "reply error INVALID"} <= tally.ends.keys()
        tally = Tally()
        campaigns.run(campaigns.deliver(target, tally), tally, 120, seed=3)
        assert tally.ends["part taken"] and tally.ends["part refused"]
        for worker in (target, draft):
            worker.check_alive()
            worker.check_empty()


def test_the_gateways_door_answers_rubbish_with_a_clear_status_and_keeps_nothing() -> None:
    with services.front_door() as front:
        tally = Tally()
        campaigns.run(campaigns.generate(front, tally), tally, 120, seed=3)
    assert {"OK", "INVALID_ARGUMENT"} <= tally.ends.keys()


def test_the_registry_answers_rubbish_with_a_clear_status_and_keeps_nothing() -> None:
    with services.registry() as (served, channel):
        tally = Tally()
        campaigns.run(campaigns.join(served, channel, tally), tally, 120, seed=3)
    assert {"OK", "INVALID_ARGUMENT"} == tally.ends.keys()
