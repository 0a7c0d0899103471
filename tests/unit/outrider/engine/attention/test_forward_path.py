"""Adopted blocks compute what a forward without any cache computes, on every path; so do copies made for a writer."""

import random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.kv_pool import BlockTable, KVPool, OutOfBlocks
from outrider.engine.loading.attention_choice import FACTORIES
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig
from tests.forked_table import forked
from tests.native import skip_without_library
from tests.tiny_models import tiny_llama

VOCAB_SIZE = 97
TOLERANCE = 1e-4
"""Largest logit difference, float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("llama"), VOCAB_SIZE)


@pytest.fixture(scope="module")
def truth(folder: str) -> UncachedModel:
    return UncachedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module", params=list(FACTORIES))
def loaded(folder: str, request: pytest.FixtureRequest) -> ModelRunner:
    options = {"device": "cpu", "dtype": "auto", "max_slots": 4, "context_limit": None, "kv_cache_tokens": 256}
    if request.param == "flash" and not torch.cuda.is_available():
        pytest.skip("the flash path runs on a GPU alone")
    if request.param == "fused":
        skip_without_library()
    return load_runner(TargetConfig(model=folder, attention_path=request.param, **options))


@pytest.fixture
def runner(loaded: ModelRunner) -> ModelRunner:
    """With a pool that knows nothing and holds 256 tokens."""
    loaded.set_pool(KVPool(16, BLOCK_SIZE))
    return loaded


def some_ids(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(count)]


def feed(runner: ModelRunner, table: BlockTable, ids: list[int], num_logits: int = 1) -> Tensor:
    """[num_logits, V] of the last positions of `ids`, whose first tokens the table holds."""
    return runner.forward([Row.of(table, ids, table.num_tokens, num_logits)])


def worst(logits: Tensor, truth: UncachedModel, ids: list[int]) -> float:
    return float((logits - truth.forward(ids)[-len(logits) :]).abs().max())


def ended(runner: ModelRunner, ids: list[int], salt: bytes = b"") -> None:
    """A request of these tokens was served and has ended."""
    table = runner.pool.new_table()
    feed(runner, table, ids)
    runner.pool.prefix.publish(table, ids, salt)
    table.free()


def test_two_prefills_and_a_verified_slot_do_not_disturb_each_other(runner: ModelRunner, truth: UncachedModel) -> None:
    shared = some_ids(48, 4)
    ended(runner, shared)
    rows, texts = [], [shared + some_ids(9, seed) for seed in (5, 6)]
    for ids in texts:
        table = runner.pool.new_table()
        runner.pool.prefix.adopt(table, ids[:-1])
        rows.append(Row.of(table, ids, table.num_tokens, 3))
    first, second = runner.forward(rows).split(3)
    assert worst(first, truth, texts[0]) < TOLERANCE and worst(second, truth, texts[1]) < TOLERANCE
    guesser = rows[0].table
    guesser.truncate(40)  # into a block that the other one reads
    guesses = shared[:40] + some_ids(15, 7)
    assert worst(feed(runner, guesser, guesses, 4), truth, guesses) < TOLERANCE
    longer = [*texts[1], 11]
    assert worst(feed(runner, rows[1].table, longer), truth, longer) < TOLERANCE


def test_equal_blocks_are_exchanged_under_a_running_request(runner: ModelRunner, truth: UncachedModel) -> None:
    ids = some_ids(40, 8)
    one, two = runner.pool.new_table(), runner.pool.new_table()
    runner.forward([Row.of(one, ids, 0, 0), Row.of(two, ids, 0, 0)])
    for table in (one, two):
        runner.pool.prefix.publish(table, ids)
    assert one.blocks[:2] == two.blocks[:2]
    for table, seed in ((one, 9), (two, 10)):
        longer = ids + some_ids(5, seed)
        assert worst(feed(runner, table, longer, 5), truth, longer) < TOLERANCE


def test_a_table_that_got_its_copy_before_memory_ran_out_keeps_its_tokens(
    runner: ModelRunner, truth: UncachedModel
) -> None:
    runner.set_pool(KVPool(4, BLOCK_SIZE))
    ids = some_ids(20, 11)
    one = runner.pool.new_table()
    feed(runner, one, ids)
    two, three = forked(runner.pool, one), runner.pool.new_table()
    longer, long = ids + some_ids(3, 12), some_ids(30, 13)
    with pytest.raises(OutOfBlocks, match="raise kv_cache_tokens"):
        runner.forward([Row.of(two, longer, 20, 1), Row.of(three, long, 0, 1)])
    assert (two.num_tokens, three.num_tokens) == (20, 0)
    for table in (two, one):
        assert worst(feed(runner, table, longer), truth, longer) < TOLERANCE
