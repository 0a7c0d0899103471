"""Answers that the target writes to learn from."""

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.training import written
from outrider.training.train_head import frequent_ids
from outrider.training.written import Answer, GenerationTask, draw, generate
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopRequested


def test_writing_goes_on_with_the_same_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "AT_ONCE", 2)
    prompts = [([5 + i, 6] + [7] * i, (0.0, 0.7, 1.0)[i % 3]) for i in range(5)]
    task = GenerationTask(str(folder / "target"), prompts, 8, seed=1)
    whole = generate(task, tmp_path / "whole", lambda done, total: None)
    assert [answer.start for answer in whole] == [2, 3, 4, 5, 6]
    assert all(answer.ids[: answer.start].tolist() == ids for answer, (ids, _) in zip(whole, prompts, strict=True))

    def stops(done: int, total: int) -> None:
        if done > 4 * 8:  # in the middle of a part
            raise StopRequested

    with pytest.raises(StopRequested):
        generate(task, tmp_path / "parts", stops)
    parts = tmp_path / "parts" / f"text-{task.digest}"
    first = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert sorted(first) == ["00000.npz", "00001.npz"]
    again = generate(task, tmp_path / "parts", lambda done, total: None)
    assert [answer.ids.tolist() for answer in again] == [answer.ids.tolist() for answer in whole]
    assert {name: (parts / name).stat().st_mtime_ns for name in first} == first


def test_a_drawn_id_follows_the_distribution_and_the_best_is_chosen_at_temperature_0() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.3]]).log().repeat(1000, 1)
    uniforms = (np.arange(1000) + 0.5) / 1000
    assert np.bincount(draw(logits, [1.0] * 1000, uniforms)).tolist() == [500, 200, 300]
    squares = np.array([0.25, 0.04, 0.09]) / 0.38
    assert np.bincount(draw(logits, [0.5] * 1000, uniforms)) == pytest.approx(1000 * squares, abs=1)
    assert set(draw(logits, [0.0] * 1000, uniforms)) == {0}


def test_ids_that_are_equal_in_float32_are_drawn_by_the_distribution() -> None:
    """All of them are less likely than half the distance of the float32 numbers around 1."""
    num, less = 4, 2.0**-26
    logits = torch.tensor([1.0, *[less] * num]).log()[None]
    middles = (1.0 + less * (np.arange(num) + 0.5)) / (1.0 + num * less)
    assert [draw(logits, [1.0], np.array([middle]))[0] for middle in middles] == [1, 2, 3, 4]


def test_prompts_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    def fails(ids: list[int], max_tokens: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            generate(
                GenerationTask(str(folder / "target"), [(ids, 0.0)], max_tokens, 0), tmp_path, lambda done, total: None
            )

    fails([5] * 10, 60, "are 70, the context limit of .* is 64; lower --max-tokens")
    fails([5], 10, r"token ids \[5\], must have 2 or more")


def test_the_most_frequent_ids_are_kept() -> None:
    answers = [Answer(np.array([1, 1, 1, 7, 7, 3, 5, 3], dtype=np.int32), 3, 0.0)]  # 1 is only in the prompt
    assert frequent_ids(answers, 3, 9).tolist() == [3, 5, 7]
    with pytest.raises(ConfigError, match="--draft-vocab is 10, must be 1 to 9"):
        frequent_ids(answers, 10, 9)
