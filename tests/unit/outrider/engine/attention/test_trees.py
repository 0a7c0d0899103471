"""Rows that are token trees: a node's logits are those of the chain that ends with it, and a kept path goes on as one.

Every architecture's trees are in test_architectures.
"""

import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.engine.loading.attention_choice import FACTORIES, choose_path, tree_refusal
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest
from tests.forked_table import forked
from tests.native import skip_without_library
from tests.rounds import Fed, Grown, Truth, some_ids, some_parents, truth_of
from tests.tiny_models import random_model
from tests.zoo import COMMON, MIXED, SHAPE, WINDOW

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-2}
"""Largest difference, as a share of the largest logit."""
VOCAB_SIZE = 97
CONTEXT = 128
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "window": ("mistral", {**SHAPE, **WINDOW}),
    "windows in some layers": (
        "qwen2",
        {**SHAPE, "sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "windows and soft caps": ("gemma2", {**SHAPE, **WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma with windows": ("gemma3_text", {**SHAPE, **MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "named windows": ("cohere2", {**SHAPE, **MIXED}),
    "learned positions": ("biogpt", {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "ALiBi": ("bloom", {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


@lru_cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family, options = FAMILIES[name]
    return random_model(CONFIG_MAPPING[family](**options), seed=5).to(dtype).eval()


@lru_cache
def truth(name: str, dtype: torch.dtype = torch.float32) -> Truth:
    return truth_of(model_of(name, dtype))


@lru_cache
def runner_of(name: str, path: str, dtype: torch.dtype = torch.float32, num_blocks: int = 128) -> ModelRunner:
    if path == "fused":
        skip_without_library()
    model = model_of(name, dtype)
    facts = ModelFacts("tiny", VOCAB_SIZE, CONTEXT, str(dtype).removeprefix("torch."), "cpu", (0,), 0)
    forward = FACTORIES[path](model, facts)
    runner = ModelRunner(forward, facts, KVPool(num_blocks, forward.block_size), torch.device("cpu"))
    runner.tree_refusal = tree_refusal(runner, UncachedModel(model))
    assert runner.pool.num_in_use == 0
    return runner


def grown(runner: ModelRunner, ids: list[int], num_nodes: int, seed: int) -> Grown:
    """A tree over what is cached of `ids` already; nothing of it is fed."""
    nodes, parents = some_ids(num_nodes, VOCAB_SIZE, seed + 1), some_parents(num_nodes, seed + 2)
    return Grown(runner, runner.pool.new_table(), ids, nodes, parents)


def error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def node_errors(tree: Grown, logits: Tensor, expected: Truth) -> list[float]:
    """By leaf, over its whole path; logits [nodes, V]."""
    return [error(logits[tree.path_to(leaf)], expected(tree.chain_to(leaf))[len(tree.ids) :]) for leaf in tree.leaves()]


def feed(tree: Grown, cuts: list[int], beside: list[Row]) -> Tensor:
    """All nodes in feeds that end at `cuts`, the first of them with the rows beside -> [nodes, V]."""
    parts = []
    for first, end in zip([0, *cuts], [*cuts, len(tree.nodes)], strict=True):
        if first < end:
            parts.append(tree._runner.forward([tree.row(first, end), *beside])[: end - first])
            beside = []
    return torch.cat(parts)


CASES = [
    *(("fused", name) for name in ("llama", "window", "windows in some layers", "gemma with windows")),
    *(("paged", name) for name in ("llama", "window", "windows and soft caps")),
    *(("dense", name) for name in ("llama", "window", "named windows", "learned positions")),
]


@pytest.mark.parametrize(("path", "name"), CASES)
@settings(max_examples=6)
@given(num_ids=st.integers(1, 70), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3), seed=st.integers(0, 999))
def test_rounds_of_random_trees_equal_chains(path: str, name: str, num_ids: int, sizes: list[int], seed: int) -> None:
    """Trees grown in pieces beside a verify and a prompt, a path kept, a chain fed, and all again."""
    runner, expected, dice = runner_of(name, path), truth(name), random.Random(seed)
    tree = grown(runner, some_ids(num_ids, VOCAB_SIZE, seed), sum(sizes), seed)
    other = Fed(runner, expected, some_ids(40, VOCAB_SIZE, seed + 9), relative=True)
    if num_ids > 1:
        runner.forward([Row.of(tree.table, tree.ids[:-1], 0, 0), other.row(20, 0)])
        other.num_cached = 20
    runner.forward([Row.of(tree.table, tree.ids, num_ids - 1, 0)])
    errors: list[float] = []
    for _ in range(2):
        cuts = [sum(sizes[:i]) for i in range(1, len(sizes))]
        verify = Row.of(other.table, other.ids[: other.num_cached + 6], other.num_cached, 6)
        errors += node_errors(tree, feed(tree, cuts, [verify]), expected)
        other.num_cached += 6
        tree.keep(dice.randrange(len(tree.nodes)))
        after = [*tree.ids, *some_ids(3, VOCAB_SIZE, seed + 5)]
        logits = runner.forward([Row.of(tree.table, after, len(tree.ids), 3)])
        errors.append(error(logits, expected(after)[-3:]))
        tree.ids, tree.nodes = after, some_ids(sum(sizes), VOCAB_SIZE, seed + 6)
        tree.parents = some_parents(len(tree.nodes), seed + 7)
    errors.append(other.error(other.row(other.num_cached + 1, 1), runner.forward([other.row(other.num_cached + 1, 1)])))
    tree.table.free()
    other.table.free()
    assert max(errors) < TOLERANCE[torch.float32], errors
    assert runner.pool.num_in_use == 0


@pytest.mark.parametrize(("path", "name"), CASES)
@settings(max_examples=6)
@given(num_ids=st.integers(1, 70), size=st.integers(4, 24), shares=st.booleans(), seed=st.integers(0, 999))
def test_a_tree_goes_on_under_what_was_committed(
    path: str, name: str, num_ids: int, size: int, shares: bool, seed: int
) -> None:
    """Re-rooted and grown twice: what survives is not fed again, and no block of the trunk is copied."""
    runner, expected, dice = runner_of(name, path), truth(name), random.Random(seed)
    tree = grown(runner, some_ids(num_ids, VOCAB_SIZE, seed), size, seed)
    runner.forward([Row.of(tree.table, tree.ids, 0, 0)])
    errors: list[float] = []
    other = forked(runner.pool, tree.table) if shares else None
    trunk = list(tree.table.blocks[: num_ids // tree.table.block_size])
    feed(tree, [], [])
    for turn in range(2):
        tree.rebase(dice.randrange(len(tree.nodes)))
        assert tree.table.blocks[: len(trunk)] == trunk
        before = len(tree.nodes)
        tree.nodes += some_ids(size, VOCAB_SIZE, seed + turn)
        tree.parents += [dice.randrange(-1, node) for node in range(before, before + size)]
        logits = runner.forward([tree.row(before, len(tree.nodes))])
        for node in range(before, len(tree.nodes)):
            errors.append(error(logits[node - before], expected(tree.chain_to(node))[-1]))
    if other is not None:
        after = [*some_ids(num_ids, VOCAB_SIZE, seed), 7]
        errors.append(error(runner.forward([Row.of(other, after, num_ids, 1)]), expected(after)[-1:]))
        other.free()
    tree.table.free()
    assert max(errors) < TOLERANCE[torch.float32], errors
    assert runner.pool.num_in_use == 0


# The same bits, on the path that promises them.


def alone(runner: ModelRunner, ids: list[int]) -> Tensor:
    """[T, V] of a chain fed at once."""
    table = runner.pool.new_table()
    logits = runner.forward([Row.of(table, ids, 0, len(ids))])
    table.free()
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "window", "windows in some layers", "gemma with windows"])
@settings(max_examples=8)
@given(
    num_ids=st.sampled_from([1, 15, 16, 17, 47, 63, 64, 65, 80]), num_nodes=st.integers(1, 20), seed=st.integers(0, 99)
)
def test_the_same_bits_as_a_chain(dtype: torch.dtype, name: str, num_ids: int, num_nodes: int, seed: int) -> None:
    runner = runner_of(name, "fused", dtype)
    tree = grown(runner, some_ids(num_ids, VOCAB_SIZE, seed), num_nodes, seed)
    runner.forward([Row.of(tree.table, tree.ids, 0, 0)])
    logits = feed(tree, [num_nodes // 3], [])
    for leaf in tree.leaves():
        assert torch.equal(logits[tree.path_to(leaf)], alone(runner, tree.chain_to(leaf))[num_ids:])
    tree.keep(random.Random(seed).choice(tree.leaves()))
    after = [*tree.ids, *some_ids(5, VOCAB_SIZE, seed)]
    logits = runner.forward([Row.of(tree.table, after, len(tree.ids), 5)])
    assert torch.equal(logits, alone(runner, after)[-5:])
    tree.table.free()


def test_the_same_bits_in_a_tree_too_large_for_one_piece_of_work() -> None:
    """More queries than a piece takes, and a chain deeper than a tile of keys."""
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            runner_of.cache_clear()
            runner = runner_of("llama", "fused")
            tree = Grown(runner, runner.pool.new_table(), some_ids(21, VOCAB_SIZE, 1), some_ids(140, VOCAB_SIZE, 2), [])
            tree.parents = [*range(-1, 89), *(node // 2 for node in range(50))]
            runner.forward([Row.of(tree.table, tree.ids, 0, 0)])
            logits = feed(tree, [], [])
            for leaf in (89, 99, 120, 139):
                assert torch.equal(logits[tree.path_to(leaf)], alone(runner, tree.chain_to(leaf))[21:])
    finally:
        torch.set_num_threads(before)
        runner_of.cache_clear()


# What is kept, and what others have of it.


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
def test_a_fork_made_before_the_decision_keeps_the_whole_tree(path: str) -> None:
    runner, expected = runner_of("llama", path), truth("llama")
    tree = grown(runner, some_ids(21, VOCAB_SIZE, 1), 0, 1)
    tree.nodes, tree.parents = some_ids(14, VOCAB_SIZE, 3), [-1, 0, 0, 2, 1, 3, 2, 5, 7, 8, 9, 10, 11, 12]
    runner.forward([Row.of(tree.table, tree.ids, 0, 0)])
    feed(tree, [], [])
    fork = Grown(runner, forked(runner.pool, tree.table), tree.ids, tree.nodes, tree.parents)
    shared = list(fork.table.blocks)
    tree.keep(13)  # over an end of a block
    assert fork.table.blocks == shared and tree.table.blocks[0] == shared[0] and tree.table.blocks[1] != shared[1]
    fork.keep(4)
    for one in (tree, fork):
        after = [*one.ids, 5, 6]
        logits = runner.forward([Row.of(one.table, after, len(one.ids), 2)])
        assert error(logits, expected(after)[-2:]) < TOLERANCE[torch.float32]
        one.table.free()
    assert runner.pool.num_in_use == 0


def test_a_published_prefix_is_neither_moved_nor_lost() -> None:
    runner = runner_of("llama", "fused")
    runner.set_pool(KVPool(64, 16))
    ids = some_ids(40, VOCAB_SIZE, 1)
    tree = grown(runner, ids, 12, 1)
    tree.parents = [-1, 0, 0, 2, 3, 4, 4, 6, 7, 8, 9, 10]
    runner.forward([Row.of(tree.table, ids, 0, 0)])
    runner.pool.prefix.publish(tree.table, ids)
    feed(tree, [], [])
    tree.keep(11)
    adopted = runner.pool.new_table()
    assert runner.pool.prefix.adopt(adopted, ids) == 32 and adopted.blocks == tree.table.blocks[:2]
    runner.pool.prefix.publish(tree.table, tree.ids)  # 40 + 10 tokens: the third block has nodes of the tree
    again = runner.pool.new_table()
    assert runner.pool.prefix.adopt(again, tree.ids) == 48
    logits = runner.forward([Row.of(again, [*tree.ids, 7], 48, len(tree.ids) - 47)])
    assert error(logits, truth("llama")([*tree.ids, 7])[48:]) < TOLERANCE[torch.float32]


# What is refused.


def row_of_a_tree(table: BlockTable, num_cached: int, parents: list[int]) -> Row:
    return Row(table, [1] * len(parents), num_cached, 1, [2] * num_cached, parents)


def test_a_model_that_counts_columns_runs_no_trees_and_has_a_reason() -> None:
    runner = choose_path(model_of("ALiBi"), runner_of("ALiBi", "dense").facts, "auto", False)
    assert not runner.supports_trees
    table = runner.pool.new_table()
    with pytest.raises(InvalidRequest, match=r"the dense path of tiny runs no token trees: .*bloom takes no positions"):
        runner.forward([row_of_a_tree(table, 0, [-1, 0, 0])])
    assert table.num_tokens == 0
    runner.forward([Row.of(table, [1, 2, 3], 0, 1)])  # chains go on


def test_a_tree_may_be_wider_than_the_context_but_not_deeper() -> None:
    runner = runner_of("llama", "fused")
    table = runner.pool.new_table()
    runner.forward([Row.of(table, [1] * 120, 0, 0)])
    with pytest.raises(InvalidRequest, match="a row of 129 tokens is past the context limit, 128"):
        runner.forward([row_of_a_tree(table, 120, [-1, *range(8)])])
    assert table.num_tokens == 120
    logits = runner.forward([row_of_a_tree(table, 120, [-1, *range(7), *[0] * 20])])
    assert error(logits, alone(runner, [1] * 122)[-1:]) == 0.0
    table.free()
