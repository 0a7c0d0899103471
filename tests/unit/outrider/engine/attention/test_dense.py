"""The dense path's memory."""

import pytest
import torch

from outrider.engine.attention.dense import DenseLayer
from outrider.engine.loading.self_test import NUM_BLOCKS
from outrider.wire.errors import ConfigError
from tests.tiny_models import tiny_llama
from tests.unit.outrider.engine.loading.tiny_models import load


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("original"), vocab_size=300)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_memory_that_is_gone_when_it_is_taken_is_an_error_at_start(
    original: str, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """As when another process on the GPU took it meanwhile; the self-test's small cache still fits."""
    new_storage = DenseLayer._new_storage

    def out_of_memory(self: DenseLayer, states: torch.Tensor) -> torch.Tensor:
        if self._shape[0] > NUM_BLOCKS + 1:
            raise kind("tried to allocate more than there is\nsecond line")
        return new_storage(self, states)

    monkeypatch.setattr(DenseLayer, "_new_storage", out_of_memory)
    message = r"no memory on cpu for a KV cache of 512 tokens, 131072 bytes: tried to .* is; set kv_cache_tokens lower$"
    with pytest.raises(ConfigError, match=message):
        load(original)
