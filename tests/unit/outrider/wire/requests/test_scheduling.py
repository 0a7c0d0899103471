"""Who comes next where not everybody can at once."""

import math
from collections import Counter

import pytest

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.scheduling import Scheduling, VirtualTokens

A, B, C = b"a", b"b", b"c"


def dealt(tokens: VirtualTokens, weights: dict[bytes, float], count: int, amount: float = 1.0) -> str:
    """Give to whom least was given, so many times; return to whom."""
    order = ""
    for _ in range(count):
        caller = min(weights, key=tokens.served)
        tokens.add_served(caller, amount)
        order += caller.decode()
    return order


def waiting(**weights: float) -> tuple[VirtualTokens, dict[bytes, float]]:
    tokens, by_caller = VirtualTokens(), {name.encode(): weight for name, weight in weights.items()}
    tokens.wait(by_caller, by_caller)
    return tokens, by_caller


def test_each_is_given_by_its_weight() -> None:
    order = dealt(*waiting(a=1.0, b=2.0, c=5.0), 80)
    assert (order.count("a"), order.count("b"), order.count("c")) == (10, 20, 50)


def test_callers_neither_save_up_nor_owe() -> None:
    tokens, weights = waiting(a=1.0, b=3.0)
    tokens.add_served(A, 100.0)
    tokens.add_served(B, 60.0)
    tokens.wait(weights | {C: 1.0}, [A, B, C])
    assert tokens.served(C) == pytest.approx(40.0), "the average of all that waited"
    tokens.wait({B: 3.0, C: 1.0}, [A, B, C])
    tokens.wait(weights | {C: 1.0}, [A, B, C])
    assert tokens.served(A) == 100.0, "it was here"
    tokens.wait({B: 3.0, C: 1.0}, [B, C])
    tokens.wait(weights | {C: 1.0}, [A, B, C])
    assert tokens.served(A) == pytest.approx(40.0), "it was not"
    tokens.wait(weights, [A, B, C])
    tokens.add_served(B, 80.0)
    tokens.wait(weights | {C: 1.0}, [A, B, C])
    assert tokens.served(C) == pytest.approx(60.0), "it wanted none meanwhile"


def test_a_waiting_caller_is_served_among_others_that_come_and_go() -> None:
    tokens, num_given = VirtualTokens(), Counter[bytes]()
    for number in range(400):
        others = {b"%d" % each: 1.0 for each in range(number, number + 4)}  # one is gone, and one is new
        tokens.wait({A: 1.0} | others, [A, *others])
        first = min((A, *others), key=tokens.served)
        tokens.add_served(first, 1.0)
        num_given[first] += 1
    assert num_given[A] >= 400 / 6


def test_who_is_served_whole_does_not_go_before_others_again() -> None:
    """Of eight callers that want one each, and have five together: all get as many."""
    names = [bytes([index]) for index in range(8)]
    tokens, got = VirtualTokens(), Counter[bytes]()
    for _ in range(80):
        tokens.wait(dict.fromkeys(names, 1.0), names)
        served = sorted(names, key=tokens.served)[:5]
        got.update(served)
        for caller in served:
            tokens.add_served(caller, 1.0)
        tokens.wait({caller: 1.0 for caller in names if caller not in served}, names)
    assert set(got.values()) == {50}


def test_scheduling_survives_its_message() -> None:
    asked = Scheduling(b"k" * 32, 2.5, -7, 40.0)
    assert Scheduling.from_proto(asked.to_proto()) == asked
    assert Scheduling.from_proto(pb.Scheduling()) == Scheduling()


@pytest.mark.parametrize(
    "wrong",
    [{"caller": b"k" * 33}, {"weight": -1.0}, {"weight": math.inf}, {"weight": 1e-4}, {"max_tpot_ms": math.nan}],
)
def test_a_message_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        Scheduling.from_proto(pb.Scheduling(**wrong))  # type: ignore[arg-type]
