"""Steps served by graphs: buffers, padding, choice of shape, and every way back to an eager step."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaMLP

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.attention.paged import PagedPath
from outrider.engine.attention.varlen_attention import BLOCK_SIZE, VarlenAttention
from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.cuda.step_graphs import FREE_TOKENS, Graph, StepShape, best_shape
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.attention_choice import features_refusal
from outrider.engine.loading.self_test import largest_error
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row
from tests.shrunk import shrunk
from tests.tiny_models import random_model
from tests.unit.outrider.engine.cuda.cuda_tape import TapeMaker, varlen_attn

CONTEXT = 128
MAX_ROWS = 3
WIDTHS = (6, 1)


def make(name: str, maker: TapeMaker) -> tuple[ModelRunner, GraphedPath, UncachedModel]:
    model = random_model(shrunk(name), seed=3)
    vocab_size = model.config.vocab_size
    path = GraphedPath(PagedPath(model, vocab_size, VarlenAttention(varlen_attn)), model, vocab_size, maker, WIDTHS)
    facts = ModelFacts("tiny", vocab_size, CONTEXT, "float32", "cpu", (0,), 0, num_layers=2, hidden_size=128)
    runner = ModelRunner(path, facts, KVPool(8, BLOCK_SIZE), torch.device("cpu"))
    runner.allocate()
    path.prepare(MAX_ROWS, CONTEXT)
    maker.num_replays = 0  # of those that proved the graphs
    return runner, path, UncachedModel(model)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_steps_by_graph_equal_a_forward_without_cache(name: str) -> None:
    maker = TapeMaker()
    runner, path, truth = make(name, maker)
    assert maker.num_captures == len(path._graphs.shapes) == 6
    assert largest_error(runner, truth) < 1e-4
    assert maker.num_replays >= 2


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "phi3", "olmo2"])
def test_other_classes_can_be_captured_too(name: str) -> None:
    """Their modules wait for the device nowhere."""
    assert len(make(name, TapeMaker())[1]._graphs.shapes) == 6


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
    assert "not permitted" in caplog.text and not path._graphs.shapes
    assert largest_error(runner, truth) < 1e-4


def test_ragged_rows_are_padded_without_touching_anybodys_cache() -> None:
    maker = TapeMaker()
    runner, _, truth = make("llama", maker)
    generator = random.Random(5)
    sequences = [[generator.randrange(97) for _ in range(60)] for _ in range(3)]
    tables = [runner.pool.new_table() for _ in sequences]
    cached = [20, 31, 7]
    runner.forward([Row.of(t, ids[:n], 0, 0) for t, ids, n in zip(tables, sequences, cached, strict=True)])
    while cached[0] < 40:
        before = maker.num_replays
        widths = [generator.randint(1, 6) for _ in sequences]
        rows = [
            Row.of(table, ids[: n + width], n, generator.randint(0, width))
            for table, ids, n, width in zip(tables, sequences, cached, widths, strict=True)
        ]
        expected = [
            truth.forward(ids[: row.num_tokens])[row.num_tokens - row.num_logits :]
            for row, ids in zip(rows, sequences, strict=True)
        ]
        torch.testing.assert_close(runner.forward(rows), torch.cat(expected), atol=1e-4, rtol=1e-4)
        assert maker.num_replays == before + 1
        cached = [row.num_tokens - row.num_tokens % 2 for row in rows]  # some of it is rolled back
        for table, n in zip(tables, cached, strict=True):
            table.truncate(n)


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


def test_only_a_tap_that_is_new_has_a_step_captured_again() -> None:
    """Those that were dropped, asked for in another order, or set and not used, cost no capture."""
    maker = TapeMaker()
    runner, path, truth = make("llama", maker)
    runner.features_refusal = None
    sequences = [[random.Random(seed).randrange(97) for _ in range(100)] for seed in range(3)]
    tables, cached, num_captures = [runner.pool.new_table() for _ in sequences], [20, 31, 7], maker.num_captures
    runner.forward([Row.of(t, ids[:n], 0, 0) for t, ids, n in zip(tables, sequences, cached, strict=True)])
    for taps, captured in (((0, NORMED), 1), ((NORMED,), 1), ((), 1), ((NORMED, 0), 1), ((1,), 2), ((), 2)):
        runner.set_taps([2])
        runner.set_taps(taps)
        for widths in ((6, 2, 1), (3, 1, 5)):  # padded to the same shape
            before = maker.num_replays
            rows = [
                Row.of(table, ids[: n + width], n, 1)
                for table, ids, n, width in zip(tables, sequences, cached, widths, strict=True)
            ]
            logits = runner.forward(rows)
            cached = [row.num_tokens for row in rows]
            expected = [truth.forward(ids[:n])[-1] for ids, n in zip(sequences, cached, strict=True)]
            torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=1e-4)
            assert maker.num_captures == num_captures + captured and maker.num_replays > before
            if not taps:
                assert runner.features.numel() == 0
                continue
            hidden = [truth.hidden_states(ids[:n])[-w:] for ids, n, w in zip(sequences, cached, widths, strict=True)]
            torch.testing.assert_close(runner.features, torch.cat(hidden)[:, list(taps)], atol=1e-4, rtol=1e-4)
    assert len(path._graphs.shapes) == 6
    runner.set_taps([0, 1])
    assert features_refusal(runner, truth) is None
    prompt = sequences[0][:40]
    runner.set_taps([0])
    runner.forward([Row.of(runner.pool.new_table(), prompt, 0, 1)])  # eagerly
    torch.testing.assert_close(runner.features, truth.hidden_states(prompt)[:, :1], atol=1e-4, rtol=1e-4)


def test_a_capture_writes_nothing_of_the_step_before_it() -> None:
    """A step's drafts were refused and others are where they were when it is captured again, for a new tap."""
    maker = TapeMaker()
    runner, _, truth = make("llama", maker)
    runner.features_refusal = None
    ids = [random.Random(1).randrange(97) for _ in range(40)]
    wrong = [*ids[:20], *((each + 1) % 97 for each in ids[20:26])]
    table, other = runner.pool.new_table(), runner.pool.new_table()
    runner.forward([Row.of(table, ids[:20], 0, 0)])
    runner.forward([Row.of(table, wrong, 20, 1)])
    table.truncate(20)
    runner.forward([Row.of(table, ids[:36], 20, 0)])  # eagerly: it is a piece of a prompt
    num_captures = maker.num_captures
    runner.set_taps([1])
    runner.forward([Row.of(other, ids[:20], 0, 0)])
    runner.forward([Row.of(other, ids[:26], 20, 1)])
    assert maker.num_captures == num_captures + 1
    logits = runner.forward([Row.of(table, ids[:37], 36, 1)])
    torch.testing.assert_close(logits[0], truth.forward(ids[:37])[-1], atol=1e-4, rtol=1e-4)


class Broken(TapeMaker):
    """What it captures computes something else on replay."""

    def capture(self, compute: Callable[[], None]) -> Graph:
        tape = super().capture(compute)
        tape.operations = [entry for entry in tape.operations if "rsqrt" not in entry[0].name()]
        return tape


def test_a_graph_that_differs_serves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner, path, truth = make("llama", Broken())
    assert not path._graphs.shapes and "dropped" in caplog.text
    assert largest_error(runner, truth) < 1e-4


@given(
    shapes=st.sets(st.builds(StepShape, st.sampled_from([1, 2, 4, 8, 64]), st.sampled_from([1, 2, 4, 6, 9]))),
    widths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=70),
)
def test_the_chosen_shape_holds_the_rows_and_no_smaller_one_does(
    shapes: set[StepShape], widths: list[tuple[int, int]]
) -> None:
    table = KVPool(1).new_table()
    rows = [Row(table, [0] * new, cached, 1, [0] * cached) for new, cached in widths]

    def holds(shape: StepShape) -> bool:
        return shape.num_rows >= len(rows) and all(row.num_new <= shape.width <= row.num_tokens for row in rows)

    best = best_shape(shapes, rows)
    if best is None:
        allowed = max(FREE_TOKENS, 2 * sum(new for new, _ in widths))
        assert not rows or not any(holds(shape) and shape.num_tokens <= allowed for shape in shapes)
    else:
        assert best in shapes and holds(best)
        assert not any(holds(shape) and shape.num_tokens < best.num_tokens for shape in shapes)
