"""What a GGUF file is refused for."""

import pytest

from outrider.engine.loading.loader import check_weights, read_config
from outrider.wire.errors import ConfigError


def refusal(model: str) -> str:
    with pytest.raises(ConfigError) as raised:
        check_weights(model, read_config(model))
    assert "\n" not in raised.value.message
    return raised.value.message
