"""What the target says of its own answers, for a drafter to learn."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.training.teacher import Batch, Teacher, shuffled
from outrider.training.written import Answer
from outrider.wire.errors import ConfigError
from tests.tiny_models import tiny_llama


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", "auto")])
def test_a_target_to_learn_from_keeps_its_dtype_on_a_gpu(
    device: str, dtype: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path)
    asked: list[object] = []

    def from_pretrained(folder: str, **options: Any) -> None:
        asked.append(options["dtype"])
        raise OSError("read no further")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(OSError, match="read no further"):
        Teacher(folder, device)
    assert asked == [dtype]


def test_positions_that_are_trained_of_a_batch() -> None:
    batch = Batch.of(
        [Answer(np.arange(6, dtype=np.int32), 3, 0.0), Answer(np.arange(4, dtype=np.int32), 2, 0.0)], "cpu"
    )
    assert batch.ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 0]]
    asked = [[places.nonzero()[:, 0].tolist() for places in batch.trained_mask(depth)] for depth in range(3)]
    assert asked == [[[2, 3, 4], [1, 2]], [[3, 4], [2]], [[4], []]]


def test_a_target_without_hidden_states_is_refused(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = teacher.network
    monkeypatch.setattr(
        teacher, "network", lambda **asked: SimpleNamespace(logits=whole(**asked).logits, hidden_states=None)
    )
    with pytest.raises(ConfigError, match="gives no hidden state of width 16 before each of its 3 layers"):
        teacher.check_hidden()


def test_every_answer_comes_once_an_epoch() -> None:
    order = shuffled(6, 4, seed=1)
    batches = np.concatenate([next(order) for _ in range(6)])
    epochs = batches.reshape(4, 6)
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert any((epochs[0] != epoch).any() for epoch in epochs[1:])
