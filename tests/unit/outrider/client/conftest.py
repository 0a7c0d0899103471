"""Fixtures of the tests beside."""

from collections.abc import Iterator

import pytest

from tests.unit.outrider.client.scripted_gateway import ScriptedGateway, serving


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with serving() as scripted:
        yield scripted
