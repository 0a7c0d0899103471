"""What is captured, and every way back to an eager step."""

import logging
import random
from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from outrider.engine.loading.self_test import largest_error
from outrider.engine.step_plan import Row
from tests.unit.outrider.engine.cuda.cuda_tape import Tape, TapeMaker
from tests.unit.outrider.engine.cuda.graphed import MAX_ROWS, make


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "phi3", "olmo2"])
def test_other_classes_can_be_captured_too(name: str) -> None:
    """Their modules wait for the device nowhere."""
    assert len(make(name, TapeMaker())[1].captured) == 6


def test_a_class_that_waits_for_the_device_runs_eagerly(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaMLP.forward

    def waiting(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        assert bool(x.isfinite().all())
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", waiting)
    with caplog.at_level(logging.WARNING):
        runner, path, truth = make("llama", TapeMaker())
    assert "not permitted" in caplog.text and not path.captured
    assert largest_error(runner, truth) < 1e-4


def test_what_no_shape_holds_runs_eagerly() -> None:
    maker = TapeMaker()
    runner, _, truth = make("llama", maker)
    ids = [random.Random(1).randrange(97) for _ in range(40)]
    table, short = runner.pool.new_table(), runner.pool.new_table()
    runner.forward([Row.of(table, ids, 0, 1)])  # a prompt
    logits = runner.forward([Row.of(short, ids[:1], 0, 1), Row.of(runner.pool.new_table(), ids[:6], 0, 1)])
    assert maker.num_replays == 0  # a row of one token cannot be made six wide
    torch.testing.assert_close(logits[:1], truth.forward(ids[:1]), atol=1e-4, rtol=1e-4)
    many = [Row.of(runner.pool.new_table(), ids[:1], 0, 1) for _ in range(MAX_ROWS + 1)]
    runner.forward(many)
    assert maker.num_replays == 0


class Broken(TapeMaker):
    """What it captures computes something else on replay."""

    def capture(self, compute: Callable[[], None]) -> Tape:
        tape = super().capture(compute)
        tape.operations = [entry for entry in tape.operations if "rsqrt" not in entry[0].name()]
        return tape


def test_a_graph_that_differs_serves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner, path, truth = make("llama", Broken())
    assert not path.captured and "dropped" in caplog.text
    assert largest_error(runner, truth) < 1e-4
