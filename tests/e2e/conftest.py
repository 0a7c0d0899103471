"""A client of the stack that a module's tests share."""

from collections.abc import AsyncIterator

import pytest

from outrider.client import AsyncClient
from tests.stack import Stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.grpc) as made:
        yield made
