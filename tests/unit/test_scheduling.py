"""Who comes next where not everybody can at once."""

from __future__ import annotations

import math

import pytest

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.scheduling import Scheduling, VirtualTokens

A, B, C = b"a", b"b", b"c"


def dealt(tokens: VirtualTokens, weights: dict[bytes, float], count: int, amount: float = 1.0) -> str:
    """Give to whom least was given, so many times; return to whom."""
    order = ""
    for _ in range(count):
        caller = min(weights, key=tokens.given)
        tokens.give(caller, amount, weights[caller])
        order += caller.decode()
    return order


def waiting(*callers: bytes) -> VirtualTokens:
    tokens = VirtualTokens()
    for caller in callers:
        tokens.join(caller)
    return tokens


def test_each_is_given_by_its_weight() -> None:
    order = dealt(waiting(A, B, C), {A: 1.0, B: 2.0, C: 5.0}, 80)
    assert (order.count("a"), order.count("b"), order.count("c")) == (10, 20, 50)


def test_nobody_saves_up_and_nobody_owes() -> None:
    tokens = waiting(A, B)
    tokens.give(A, 100.0, 1.0)
    tokens.give(B, 70.0, 1.0)
    tokens.join(C)  # it did not wait before
    assert tokens.given(C) == tokens.given(B) == 70.0
    tokens.keep([A, C])
    tokens.join(B)
    tokens.give(B, 5.0, 1.0)
    assert tokens.given(B) == 75.0
    tokens.keep([])
    tokens.give(A, 9.0, 1.0)  # it waits no more
    tokens.join(A)
    assert tokens.given(A) == 0.0


def test_what_a_message_says_is_what_was_asked_for() -> None:
    asked = Scheduling(b"k" * 32, 2.5, -7, 40.0)
    assert Scheduling.from_proto(asked.to_proto()) == asked
    assert Scheduling.from_proto(pb.Scheduling()) == Scheduling()


@pytest.mark.parametrize(
    "wrong", [{"caller": b"k" * 33}, {"weight": -1.0}, {"weight": math.inf}, {"max_tpot_ms": math.nan}]
)
def test_a_message_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        Scheduling.from_proto(pb.Scheduling(**wrong))  # type: ignore[arg-type]
