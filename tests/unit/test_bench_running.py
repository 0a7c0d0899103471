"""A benchmark's Outrider leaves signals alone, and ends with its block."""

from __future__ import annotations

import signal

import pytest

from benchmarks.running import running
from outrider.cli.supervisor import Endpoints, Supervisor


def test_ctrl_c_stays_an_interrupt_while_an_outrider_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    monkeypatch.setattr(Supervisor, "start", lambda self, reporter: Endpoints([], [], None))
    monkeypatch.setattr(Supervisor, "stop", lambda self: stopped.append(self))
    monkeypatch.setattr("outrider.cli.supervisor.become_subreaper", lambda: None)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyboardInterrupt), running({"model": "demo"}, None):
        assert [signal.getsignal(number) for number in numbers] == before
        signal.raise_signal(signal.SIGINT)
    assert len(stopped) == 1
