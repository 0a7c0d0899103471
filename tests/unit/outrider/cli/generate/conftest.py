"""Fixtures of the tests beside."""

from __future__ import annotations

from tests.unit.outrider.client.conftest import gateway

__all__ = ["gateway"]
