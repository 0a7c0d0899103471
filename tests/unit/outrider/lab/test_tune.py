"""`outrider tune`: what it refuses, before anything was measured and by whom it asks."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from outrider.lab import tune

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """The command takes them; in a test it is a guest."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


# ---- what to type


PAIR = {
    "target": {"model": "big", "device": "cuda:0", "dtype": "bfloat16", "cpu_cores": None},
    "draft": {"model": "small", "device": None, "dtype": "bfloat16", "cpu_cores": "0"},
}


def test_the_pair_is_started_as_it_was_measured() -> None:
    command = tune.up_command(PAIR)
    assert command == "outrider up --target big --draft small --target-device cuda:0 --dtype bfloat16 --draft-cores 0"
    assert tune.up_command(PAIR, with_draft=False) == (
        "outrider up --target big --target-device cuda:0 --dtype bfloat16 --no-draft"
    )
