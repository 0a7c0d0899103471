"""Fixtures of the tests beside."""

import pytest
from transformers import PreTrainedModel

from tests.shrunk import shrunk
from tests.tiny_models import random_model


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return random_model(shrunk("llama"), seed=3)
