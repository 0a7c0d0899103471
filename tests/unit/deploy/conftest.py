"""Fixtures of the tests beside."""

import pytest

from tests.unit.deploy.played import DRAIN_LIMIT_S


@pytest.fixture(autouse=True)
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.fleet.DRAIN_LIMIT_S", DRAIN_LIMIT_S)
