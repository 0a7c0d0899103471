"""Fixtures of the tests below."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.law.table import ENUMERATED
from tests.unit.outrider.engine.cuda.fake_cuda import FakeCuda, fake_cuda


@pytest.fixture(scope="module")
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch has, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def recorded(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """For tests of sound rules: the laws that they compare, the module's COMPARED, are told to pytest."""
    compared = request.module.COMPARED
    compared.clear()
    yield
    for row in compared:
        record_property(ENUMERATED, row)
