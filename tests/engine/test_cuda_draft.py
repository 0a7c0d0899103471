"""Draft loops: K tokens chosen on the device equal K steps chosen on the host, and leave the cache as those would."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from outrider.engine.cuda.draft_graph import NUM_KEPT, Drafted, DraftGraphs, Draw, draft_laws
from outrider.engine.kv_pool import BlockTable, KVPool, OutOfBlocks
from outrider.engine.model_runner import ModelFacts, ModelRunner, UncachedModel
from outrider.engine.paths.paged import PagedPath
from outrider.engine.paths.varlen_attention import BLOCK_SIZE, VarlenAttention
from outrider.engine.sampling.sampling import inverse_cdf
from outrider.engine.step_plan import Row
from tests.engine.cuda_tape import TapeMaker, varlen_attn
from tests.tiny_models import random_model, zoo

VOCAB = 200
CONTEXT = 120
LENGTHS = (4, 2)


@dataclass
class Draft:
    """A model, its runner and its loops."""

    runner: ModelRunner
    truth: UncachedModel
    loops: DraftGraphs
    maker: TapeMaker = field(default_factory=TapeMaker)

    def fed(self, ids: Sequence[int], num_cached: int) -> Row:
        """A row of all ids whose first num_cached are in the cache."""
        table = self.runner.pool.new_table()
        self.runner.forward([Row.of(table, ids[:num_cached], 0, 0)])
        return Row.of(table, ids, num_cached, 1)

    @torch.inference_mode()
    def run(self, rows: list[Row], draws: list[Draw], topk: int | None = None) -> Drafted | None:
        return self.loops.run(rows, draws, topk)

    def holds(self, table: BlockTable, ids: Sequence[int]) -> None:
        """The table's KV is that of ids[:num_tokens]: what follows them has the logits that it should."""
        assert table.num_tokens < len(ids)
        logits = self.runner.forward([Row.of(table, ids, table.num_tokens, 1)])
        torch.testing.assert_close(logits[0], self.truth.forward(ids)[-1], atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def draft() -> Iterator[Draft]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = zoo()["llama"]
    config.vocab_size = VOCAB
    model = random_model(config, seed=3)
    path = PagedPath(model, VOCAB, VarlenAttention(varlen_attn))
    facts = ModelFacts("tiny", VOCAB, CONTEXT, "float32", "cpu", (0,), 0)
    runner = ModelRunner(path, facts, KVPool(12, BLOCK_SIZE), torch.device("cpu"))
    runner.allocate()
    maker = TapeMaker()
    loops = DraftGraphs(
        path.run, maker, model.device, model.dtype, VOCAB, BLOCK_SIZE, path.copy_blocks, context_limit=CONTEXT
    )
    with torch.inference_mode():
        loops.capture(2, 1, budget_s=300.0, lengths=LENGTHS)
    assert loops.num_captured == len(LENGTHS) * 3 * 2
    yield Draft(runner, UncachedModel(model), loops, maker)
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def nothing_held(draft: Draft) -> Iterator[None]:
    tables: list[BlockTable] = []
    make = draft.runner.pool.new_table
    draft.runner.pool.new_table = lambda: tables.append(make()) or tables[-1]  # type: ignore[method-assign]
    yield
    draft.runner.pool.new_table = make  # type: ignore[method-assign]
    for table in tables:
        table.free()
    assert draft.runner.pool.num_in_use == 0


def some_ids(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(count)]


def greedy(k: int) -> Draw:
    return Draw(k, 0.0, ())


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_greedy_drafts_are_the_best_tokens_one_after_the_other(draft: Draft, k: int) -> None:
    sequences = [some_ids(30, seed=1), some_ids(9, seed=2)]
    rows, wanted = [draft.fed(sequences[0], 29), draft.fed(sequences[1], 7)], (k, 1)  # one loop for the longest
    before = draft.maker.num_replays
    drafted = draft.run(rows, [greedy(num) for num in wanted])
    assert draft.maker.num_replays == before + 1
    assert drafted.laws is None
    for row, ids, found, num in zip(rows, sequences, drafted.token_ids, wanted, strict=True):
        expected = list(ids)
        for _ in range(num):
            expected.append(int(draft.truth.forward(expected)[-1].argmax()))
        assert found == expected[len(ids) :]
        assert row.table.num_tokens == len(ids) + num - 1
        draft.holds(row.table, expected)


@pytest.mark.parametrize("topk", [None, NUM_KEPT])
def test_sampled_drafts_are_drawn_from_the_laws_that_come_with_them(draft: Draft, topk: int | None) -> None:
    sequences = [some_ids(30, seed=1), some_ids(9, seed=2)]
    rows = [draft.fed(sequences[0], 29), draft.fed(sequences[1], 8)]
    draws = [Draw(3, 0.7, (0.1, 0.5, 0.99)), greedy(3)]
    drafted = draft.run(rows, draws, topk)
    assert [law.scores.size for law in drafted.laws[0]] == [topk or VOCAB] * 3
    ids = list(sequences[0])
    for j, token_id in enumerate(drafted.token_ids[0]):
        law = torch.from_numpy(drafted.laws[0][j].dense_scores())
        truth = (draft.truth.forward(ids)[-1] / 0.7).log_softmax(dim=0)
        if topk is not None:
            best = truth.topk(topk).indices
            cut = torch.full_like(truth, -torch.inf)
            truth = cut.scatter(0, best, truth[best].log_softmax(dim=0))
        torch.testing.assert_close(law, truth, atol=1e-4, rtol=1e-4)
        cdf = law.double().exp().cumsum(dim=0)
        assert token_id == int((cdf > draws[0].uniforms[j] * cdf[-1]).nonzero()[0])
        ids.append(token_id)
    draft.holds(rows[0].table, ids)
    best = list(sequences[1])
    for _ in range(3):
        best.append(int(draft.truth.forward(best)[-1].argmax()))
    assert drafted.token_ids[1] == best[9:]


def test_laws_are_not_written_over_by_the_next_loop(draft: Draft) -> None:
    ids = some_ids(30, seed=1)
    draws = [Draw(2, 0.7, (0.1, 0.5))]
    first = draft.run([draft.fed(ids, 29)], draws).laws[0][0]
    before = first.scores.copy()
    draft.run([draft.fed(some_ids(30, seed=2), 29)], draws)
    assert (first.scores == before).all()


def test_the_coldest_temperature_still_sends_the_law_that_was_drawn_from(draft: Draft) -> None:
    drafted = draft.run([draft.fed(some_ids(30, seed=1), 29)], [Draw(2, 1e-60, (0.3, 0.7))])
    for j, token_id in enumerate(drafted.token_ids[0]):
        assert drafted.laws[0][j].prob(token_id) == 1.0


def test_what_no_loop_is_for_is_left_to_the_caller_untouched(draft: Draft) -> None:
    ids = some_ids(20, seed=3)
    cases: list[tuple[Row, Draw, int | None]] = [
        (draft.fed(ids, 17), greedy(2), None),  # three tokens to catch up
        (Row.of(draft.runner.pool.new_table(), ids[:1], 0, 1), greedy(2), None),  # too short for the first step
        (draft.fed(ids, 19), greedy(5), None),  # longer than any loop
        (draft.fed(ids, 19), Draw(2, 1.0, (0.5,) * 2), 7),  # another cut
        (draft.fed(some_ids(CONTEXT, seed=4), CONTEXT - 1), greedy(2), None),  # no room behind it
    ]
    for row, draw, topk in cases:
        before = row.table.num_tokens
        assert draft.run([row], [draw], topk) is None
        assert row.table.num_tokens == before
    near_the_end = draft.fed(some_ids(CONTEXT - 1, seed=4), CONTEXT - 2)  # of 4 drafts the last would have no place
    assert draft.run([near_the_end], [greedy(2)]).token_ids[0] is not None


def test_a_full_cache_is_told_and_nothing_is_taken(draft: Draft) -> None:
    pool = draft.runner.pool
    ids = some_ids(20, seed=3)
    rows = [draft.fed(ids, 19), draft.fed(ids, 19)]
    rows[1].table.truncate(0)
    hungry = Row.of(rows[1].table, ids[:2], 0, 1)
    taken = pool.allocate(pool.num_blocks - pool.num_in_use)
    with pytest.raises(OutOfBlocks):
        draft.run([rows[0], hungry], [greedy(2)] * 2)
    assert rows[0].table.num_tokens == 19 and hungry.table.num_tokens == 0
    pool.release(taken)
    draft.holds(rows[0].table, ids)


def test_a_forks_own_tokens_stay_its_own(draft: Draft) -> None:
    ids = some_ids(20, seed=3)
    row = draft.fed(ids, 19)
    other = row.table.fork()
    draft.run([row], [greedy(3)])
    draft.holds(other, [*ids[:19], 5])
    other.free()


def test_a_row_that_is_not_finite_is_told_and_the_others_stand(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [some_ids(30, seed=1), some_ids(9, seed=2)]
    rows = [draft.fed(sequences[0], 29), draft.fed(sequences[1], 8)]
    whole = draft.run(rows, [greedy(2)] * 2).token_ids
    poisoned = [draft.fed(sequences[0], 29), draft.fed(sequences[1], 8)]
    for layer in draft.runner.path._cache.layers:
        with torch.inference_mode():
            layer.values[poisoned[0].table.blocks[0]] = torch.nan
    assert draft.run(poisoned, [greedy(2)] * 2).token_ids == [None, whole[1]]


def test_draws_follow_their_law() -> None:
    generator = torch.Generator().manual_seed(0)
    laws = draft_laws(torch.randn(1, 12, generator=generator) * 2, torch.tensor([1.0]))
    uniforms = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    ids, _ = inverse_cdf(laws.expand(20000, -1).double().exp(), uniforms)
    frequencies = ids.bincount(minlength=12) / 20000
    torch.testing.assert_close(frequencies, laws[0].exp(), atol=1e-3, rtol=0.0)
