"""Steps served by graphs: buffers, padding, choice of shape, and every way back to an eager step."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.cuda.step_graphs import FREE_TOKENS, StepShape, best_shape
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.attention_choice import features_refusal
from outrider.engine.loading.self_test import largest_error
from outrider.engine.step_plan import Row
from tests.unit.outrider.engine.cuda.cuda_tape import TapeMaker
from tests.unit.outrider.engine.cuda.graphed import make


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_steps_by_graph_equal_a_forward_without_cache(name: str) -> None:
    maker = TapeMaker()
    runner, path, truth = make(name, maker)
    assert maker.num_captures == len(path.captured) == 6
    assert largest_error(runner, truth) < 1e-4
    assert maker.num_replays >= 2


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
    assert len(path.captured) == 6
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
