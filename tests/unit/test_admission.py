"""What is refused at the door, and when it is told to come back. No worker is asked for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.coordinator import Coordinator
from gateway.generation import GenerationRequest
from gateway.places import Places
from gateway.queue_estimate import QueueEstimate
from outrider.wire.config import GatewayConfig
from outrider.wire.errors import Overloaded, Unavailable
from outrider.wire.params import SamplingParams
from tests.unit.scripted_pool import connection_of, link_of, served_model


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def coordinator_of(**settings: Any) -> tuple[Coordinator, Places, str]:
    """Two places and two in the queue, answers taking 8 s."""
    config = GatewayConfig(target="127.0.0.1:9", max_running=2, max_queue=2, **settings)
    model = served_model({"a": link_of(connection_of())}, {}, gateway=config)
    clock = Clock()
    model.places.estimate = QueueEstimate(2, clock)
    with model.places.estimate.served():
        clock.now += 8.0
    pools: Any = SimpleNamespace(models={"target": model}, metrics=model.metrics)
    return Coordinator(cast(Any, pools)), model.places, model.facts.id


def admit(coordinator: Coordinator, model_id: str, count: int = 1) -> None:
    coordinator.admit(tuple(GenerationRequest("r", model_id, (1,), SamplingParams()) for _ in range(count)))


def test_a_full_queue_says_when_it_is_expected_to_have_been_worked_off() -> None:
    coordinator, places, model_id = coordinator_of()
    admit(coordinator, model_id, 2)
    admit(coordinator, model_id, 2)
    for call in (lambda: admit(coordinator, model_id), lambda: coordinator.check_room(model_id, 1)):
        with pytest.raises(Overloaded, match=r"4 answers are running or waiting, 1 more .* limit of 4") as full:
            call()
        assert full.value.retry_after_s == 3 * 8.0 / 2
    assert (places.num_admitted, places.num_refused) == (4, 2)


def test_who_would_wait_too_long_is_refused_though_the_queue_has_room() -> None:
    coordinator, _, model_id = coordinator_of(max_queue_wait_s=5.0)
    admit(coordinator, model_id, 3)  # two run, the third will wait for about 4 s
    with pytest.raises(Overloaded, match=r"would wait for about 8 s, more than max_queue_wait_s 5") as refused:
        admit(coordinator, model_id)
    assert refused.value.retry_after_s == 8.0


def test_without_places_taken_nobody_is_refused_for_the_wait() -> None:
    coordinator, _, model_id = coordinator_of(max_queue_wait_s=0.001)
    admit(coordinator, model_id, 1)
    admit(coordinator, model_id, 1)
    with pytest.raises(Overloaded) as refused:
        admit(coordinator, model_id, 1)
    assert refused.value.retry_after_s == 4.0


def test_a_gateway_that_stops_and_a_model_without_a_target_are_unavailable() -> None:
    coordinator, _, model_id = coordinator_of()
    with pytest.raises(Unavailable):
        coordinator.check_room("another", 1)
    coordinator.draining = True
    with pytest.raises(Unavailable, match="stopping"):
        coordinator.check_room(model_id, 1)
