"""Fixtures of the tests beside."""

import pytest

from gateway.tokenizer import Tokenizer
from tests.service.scripted_generator import demo_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()
