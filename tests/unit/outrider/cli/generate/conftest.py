"""Fixtures of the tests beside."""

from tests.unit.outrider.client.conftest import gateway

__all__ = ["gateway"]
