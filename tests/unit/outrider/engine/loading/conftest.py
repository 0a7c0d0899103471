"""Fixtures of the tests beside."""

import pytest

from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("original"), vocab_size=300)
