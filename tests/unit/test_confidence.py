"""A draft that ends its proposals where it is no longer confident of them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from draft_service.active import Asked, Drawn
from draft_service.deliveries import Sender
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.params import SamplingParams


class AtOnce:
    def answer(self, send: Any) -> None:
        send()


def proposal(min_confidence: float, **params: Any) -> Asked:
    job: Any = SimpleNamespace(
        num_draft_tokens=4, min_confidence=min_confidence, ticket=1, arrived_s=time.monotonic(), tree=None
    )
    slot: Any = SimpleNamespace(committed=[1, 2], params=SamplingParams(**params))
    return Asked(job, slot, "t:1", 9, None)


@pytest.mark.parametrize(
    ("min_confidence", "chances", "length"),
    [
        (0.0, (None, None, None, None), 4),
        (0.5, (0.9, 0.9, 0.9, 0.9), 4),
        (0.5, (0.9, 0.5), 2),
        (0.5, (0.1,), 1),
        (0.45, (0.9, 0.5, 0.5), 3),
    ],
)
def test_it_ends_with_the_token_that_makes_it_unlikely_and_the_target_is_told(
    min_confidence: float, chances: tuple[float | None, ...], length: int
) -> None:
    parts: list[Any] = []
    engine: Any = AtOnce()
    sender, a = Sender(engine, parts.append), proposal(min_confidence, temperature=0.0)
    for token_id, chance in enumerate(chances):
        assert not a.done
        a.take(Drawn(token_id, None, chance))
        sender.send_due(a)
    assert a.done and len(a.draft_ids) == a.num_announced == length
    assert [token_id for part in parts for token_id in part.draft_ids] == list(range(length))
    assert [part.num_draft_tokens for part in parts] == [length]


def test_only_drafts_that_say_nothing_of_what_was_drawn_are_watched() -> None:
    assert proposal(0.5, temperature=0.0).watched
    assert proposal(0.5, temperature=1.0, acceptance=AcceptanceRule.COUPLED).watched
    assert not proposal(0.5, temperature=1.0).watched
    assert not proposal(0.0, temperature=0.0).watched
