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


@pytest.mark.parametrize("with_ray", [True, False])
def test_workers_are_rays_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, with_ray: bool) -> None:
    made = []
    monkeypatch.setattr(Supervisor, "start", lambda self, reporter: made.append(self) or Endpoints([], [], None))
    monkeypatch.setattr(Supervisor, "stop", lambda self: None)
    monkeypatch.setattr("outrider.cli.supervisor.become_subreaper", lambda: None)
    with running({"model": "demo"}, None, with_ray=with_ray):
        assert (made[0]._config.ray is not None) == with_ray
