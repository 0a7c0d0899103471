"""What is refused at the door, and when it is told to come back. No worker is asked for it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admission.queue import BURST_S, CALM_S, AdmissionQueue
from gateway.coordinator import Coordinator
from outrider.wire.errors import Overloaded
from outrider.wire.settings.config import GatewayConfig
from tests.unit.clock import Clock
from tests.unit.gateway.scripted_pool import connection_of, link_of, served_model


def coordinator_of(**settings: Any) -> tuple[Coordinator, AdmissionQueue, str, Clock]:
    """Two places and two in the queue, answers taking 8 s."""
    config = GatewayConfig(target="127.0.0.1:9", **{"max_running": 2, "max_queue": 2} | settings)
    model = served_model({"a": link_of(connection_of())}, {}, gateway=config)
    clock = Clock()
    model.places = AdmissionQueue(config, clock)
    with model.places.estimate.served():
        clock.now += 8.0
    pools: Any = SimpleNamespace(models={"target": model}, metrics=model.metrics)
    return Coordinator(cast(Any, pools)), model.places, model.id, clock


def admit(coordinator: Coordinator, model_id: str, count: int = 1, caller: bytes = b"", weight: float = 1.0) -> None:
    coordinator.admit(model_id, count, caller, weight)


def test_a_full_queue_returns_its_expected_wait() -> None:
    coordinator, places, model_id, _ = coordinator_of()
    admit(coordinator, model_id, 2)
    admit(coordinator, model_id, 2)
    with pytest.raises(Overloaded, match=r"4 answers are running or waiting, 1 more .* limit of 4") as full:
        admit(coordinator, model_id)
    assert full.value.retry_after_s == 3 * 8.0 / 2
    assert (places.num_admitted, places.num_refused) == (4, 1)


async def test_who_leaves_before_the_answers_begin_gives_every_place_back() -> None:
    coordinator, places, model_id, _ = coordinator_of()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with coordinator.admit(model_id, 4):
                assert places.num_admitted == coordinator.num_admitted == 4
                raise ZeroDivisionError
        assert places.num_admitted == coordinator.num_admitted == 0


def test_a_burst_at_an_idle_model_waits_and_what_comes_after_it_is_refused() -> None:
    coordinator, places, model_id, clock = coordinator_of(max_queue=64)
    for _ in range(50):
        admit(coordinator, model_id)
    clock.now += BURST_S
    with pytest.raises(Overloaded, match=r"would wait for about 196 s; .* max_queue_wait_s 0.5") as refused:
        admit(coordinator, model_id)
    assert refused.value.retry_after_s == 196.0
    assert (places.num_admitted, places.num_refused) == (50, 1)


def test_under_overload_no_choice_waits() -> None:
    coordinator, places, model_id, clock = coordinator_of(max_queue=64, max_queue_wait_s=5.0)
    admit(coordinator, model_id, 2)
    clock.now += BURST_S
    admit(coordinator, model_id)  # nobody waits; about 4 s
    with pytest.raises(Overloaded, match=r"about 8 s; .* max_queue_wait_s 5"):
        admit(coordinator, model_id)
    places.change(-1)  # nobody waits again, but both places are taken
    with pytest.raises(Overloaded, match="about 4 s"):
        admit(coordinator, model_id)
    places.change(-1)
    admit(coordinator, model_id)
    with pytest.raises(Overloaded, match="about 4 s"):
        admit(coordinator, model_id)
    clock.now += CALM_S
    admit(coordinator, model_id)
    assert places.num_admitted == 3


def test_a_caller_within_its_share_is_admitted_whatever_another_has_waiting() -> None:
    coordinator, places, model_id, clock = coordinator_of(max_running=4, max_queue=4)
    admit(coordinator, model_id, 8, b"many")
    clock.now += BURST_S
    admit(coordinator, model_id, 2, b"one")
    with pytest.raises(Overloaded):  # more than half of the places
        admit(coordinator, model_id, 1, b"one")
    with pytest.raises(Overloaded):
        admit(coordinator, model_id, 1, b"many")
    admit(coordinator, model_id, 2, b"heavy", 2.0)  # 4 x 2 / (1 + 1 + 2)
    with pytest.raises(Overloaded):
        admit(coordinator, model_id, 1, b"heavy", 2.0)
    places.change(-2, b"one")
    places.change(-2, b"heavy", 2.0)
    assert places.num_admitted == 8
    admit(coordinator, model_id, 1, b"one")  # who has left takes no share
