"""Fixtures of the tests beside."""

from collections.abc import AsyncIterator

import pytest

from gateway.workers.worker_pools import Pools
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import GatewayMetrics


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    made = Pools(GatewayConfig(registry="127.0.0.1:9"), GatewayMetrics())
    yield made
    await made.close()
