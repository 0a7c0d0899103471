"""A few hundred of the inputs that `make fuzz` sends by the hundred thousand, to every proto handler of every part and
every HTTP endpoint that reads a body.
"""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.fuzz import campaigns, services
from tests.fuzz.bodies import VALID
from tests.fuzz.calls import talk
from tests.fuzz.campaigns import Tally


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[services.Worker, services.Worker]]:
    """(target, draft) of a tiny model each."""
    with services.workers(tmp_path_factory.mktemp("fuzz")) as workers:
        yield workers


def test_workers_answer_rubbish_with_a_clear_status_and_keep_nothing(
    pair: tuple[services.Worker, services.Worker],
) -> None:
    target, draft = pair
    for worker in pair:
        tally, wanted = Tally(), {"reply open", "reply error INVALID"}
        campaigns.run(campaigns.control(worker, [target.address, "", "\0"], tally), tally, 100, 3, wanted)
    tally, wanted = Tally(), {"part taken", "part refused", "drafts verified", "rows", "probes", "refused"}
    campaigns.run(campaigns.deliver(target, tally), tally, 100, 3, wanted)
    for worker in (target, draft):
        worker.check_alive()
        worker.check_empty()


def test_a_stream_that_is_refused_beside_its_first_answers_ends(pair: tuple[services.Worker, services.Worker]) -> None:
    """What is no message comes while the answers to what was before it are being written."""
    target, _ = pair
    for _ in range(200):
        status, details, _ = talk(target.channel, target.method("Control"), [target.valid(), b"\xc2*"])
        assert status is grpc.StatusCode.INVALID_ARGUMENT, (status, details)
    target.check_empty()


def test_the_gateways_door_answers_rubbish_with_a_clear_status_and_keeps_nothing() -> None:
    with services.front_door() as front:
        tally = Tally()
        campaigns.run(campaigns.generate(front, tally), tally, 120, 3, {"OK", "INVALID_ARGUMENT"})


def test_http_bodies_are_answered_in_their_protocols_form_and_nothing_is_kept(tmp_path: Path) -> None:
    with services.http_door(tmp_path) as door:
        tally = Tally()
        campaigns.run(campaigns.bodies(door, tally), tally, 200, seed=3)
    ends = [end.split() for end in tally.ends]
    assert {path for path, _ in ends} == VALID.keys() and {"200", "400"} <= {status for _, status in ends}


def test_the_registry_answers_rubbish_with_a_clear_status_and_keeps_nothing() -> None:
    with services.registry() as (served, channel):
        tally = Tally()
        campaigns.run(campaigns.join(served, channel, tally), tally, 120, 3, {"OK", "INVALID_ARGUMENT"})
    assert {"OK", "INVALID_ARGUMENT"} == tally.ends.keys()
