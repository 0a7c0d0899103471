"""Look-ahead embeddings that learn."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.loading.loader import load_runner
from outrider.engine.step_plan import Row
from outrider.papers.pass_drafter import PassDrafter
from outrider.training.pass_embeddings import LookaheadEmbeddings
from outrider.training.teacher import Batch, Teacher
from outrider.training.written import Answer
from outrider.wire.settings.config import TargetConfig
from tests.shrunk import shrunk
from tests.tiny_models import random_model, save


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
@pytest.mark.parametrize("kind", ["gemma3_text", "llama"])
def test_look_ahead_embeddings_give_the_same_logits_in_serving_as_in_training(
    kind: str, path: str, tmp_path: Path
) -> None:
    """Behind the prompt's last token and behind others, for Gemma 3, too: a tied target that scales its embedding and
    has windows.
    """
    model, num = save(random_model(shrunk(kind), seed=1), tmp_path / "target"), 3
    teacher = Teacher(model, "cpu")
    student = LookaheadEmbeddings.new(teacher, num, seed=1)
    student.save(tmp_path)
    saved = LookaheadEmbeddings.load(str(tmp_path), teacher)
    ids = [5 + 7 * i % 40 for i in range(40)]  # more than a window
    batch = Batch.of([Answer(np.array(ids, dtype=np.int32), 20, 0.0)], "cpu")
    runner = load_runner(
        TargetConfig(model=model, device="cpu", attention_path=path, lookahead_embeddings=str(tmp_path))  # type: ignore[arg-type]
    )
    served = PassDrafter(runner.facts.vocab_size, num)
    said = dict[tuple[int, int], torch.Tensor]()
    for last in (19, 20, 30, 36):
        slot: Any = SimpleNamespace(committed=ids[: last + 1], max_len=99, key=(1, 1))
        rows = served.extra_rows(slot, [])
        assert rows is not None
        parents = [*range(-1, last), *(last + 1 + parent for parent in rows.parents)]
        table = runner.pool.new_table()
        row = Row(table, [*slot.committed, *rows.ids], 0, num, [], parents)
        said |= {(last + 1 + depth, depth): logits for depth, logits in enumerate(runner.forward([row]))}
        table.free()
    num_compared = 0
    for guess in saved.draft_logits(batch, teacher.see(batch), num):
        assert guess.token_indices.tolist() == list(range(20 + guess.depth, 39))
        for place, logits in zip(guess.token_indices.tolist(), guess.logits, strict=True):
            if (place, guess.depth) in said:
                num_compared += 1
                torch.testing.assert_close(logits, said[place, guess.depth], rtol=1e-3, atol=1e-3)
    assert num_compared == 3 * num + 2
