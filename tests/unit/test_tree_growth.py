"""How trees grow: how many children, whose, in which order, and what goes through the draft for them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drawing import grow_level
from draft_service.tree_growth import Growth, tree_row
from outrider.engine.kv_pool import KVPool
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.params import SamplingParams
from outrider.wire.tree_shape import TreeShape

VOCAB = 30
PROMPT = [3, 1, 4, 1, 5]
SHAPES = ("1", "5", "1x1x1", "4x2x1", "2x3x2", "40", "best:12x4", "best:7x3", "best:5x4", "best:64x8", "best:9x1")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "frequency_penalty": 1.5, "bad_words": ((7,), (1, 2))},
    "coupled": {"acceptance": AcceptanceRule.COUPLED, "temperature": 0.8},
    "rejection": {"temperature": 0.8},
    "rejection, few": {"top_k": 3, "repetition_penalty": 1.3},
}


class Model:
    """Logits after any path, always the same."""

    def __init__(self, seed: int, scale: float = 2.0) -> None:
        self._seed, self._scale = seed, scale

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        generator = np.random.default_rng([self._seed, *prefix, 1000])
        return torch.from_numpy((self._scale * generator.standard_normal(VOCAB)).astype(np.float32))


def proposal(kind: str, shape: str, seed: int = 0, topk: int | None = None) -> Any:
    """As much of an `Active` as a tree needs."""
    params = SamplingParams(max_tokens=100, seed=seed, **KINDS[kind])
    slot = Slot((0, 1), PROMPT, len(PROMPT), params, KVPool(20, 16))
    a = SimpleNamespace(
        slot=slot, growth=Growth(TreeShape.parse(shape)), topk=topk, determined=params.determined, done=None, fed=[]
    )
    a.take_tree = lambda: setattr(a, "done", a.growth.tree())
    return a


def grown(a: Any, model: Model) -> tuple[DraftTree, list[RowLaw]]:
    state = SamplingState(a.slot.params, PROMPT, (0,))
    growth: Growth = a.growth
    while a.done is None:
        a.fed.append(len(growth.frontier))
        grow_level(a, state, HostLogits(torch.stack([model.logits(growth.prefix(n)) for n in growth.frontier])), 0)
    return a.done  # type: ignore[no-any-return]


def children(tree: DraftTree) -> dict[tuple[int, ...], list[int]]:
    return {tree.prefix(node): [tree.ids[c] for c in tree.children(node)] for node in (ROOT, *range(len(tree.ids)))}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_sound_and_no_larger_than_its_shape(kind: str, shape: str) -> None:
    wanted = TreeShape.parse(shape)
    for seed in range(2):
        a = proposal(kind, shape, seed)
        tree, laws = grown(a, Model(seed))
        assert DraftTree.checked(tree.ids, tree.parents) == tree
        assert max(map(len, tree.paths)) <= wanted.depth
        assert 1 <= len(tree.ids) <= wanted.most_nodes
        assert len(a.growth.fed) <= wanted.most_nodes  # memory was promised for no more
        assert sum(a.fed) == 1 + len(a.growth.fed)
        assert max(a.fed) <= wanted.most_parents or "few" in kind
        assert len(laws) == (0 if a.determined else len(tree.inner))
        if "few" not in kind and shape != "40":  # of 30 ids
            assert len(tree.ids) == wanted.most_nodes


@pytest.mark.parametrize("shape", ["1", "1x1x1x1"])
def test_a_tree_of_one_branch_is_the_chain(shape: str) -> None:
    """Of the same numbers, so that it does not matter who says how a chain is asked for."""
    model, num = Model(5), len(shape.split("x"))
    for kind in ("greedy", "coupled"):
        tree, _ = grown(proposal(kind, shape), model)
        params, ids = SamplingParams(max_tokens=100, **KINDS[kind]), list[int]()
        for j in range(num):
            row = LogitRow(SamplingState(params, PROMPT, (0,)), tuple(ids))
            host = HostLogits(model.logits(tuple(ids))[None])
            ids.append(host.best_id(0, row) if params.greedy else coupled_id(host.law(0, row), params, len(PROMPT) + j))
        assert list(tree.ids) == ids


def test_coupled_takes_the_best_of_log_prob_and_noise() -> None:
    model, a = Model(2), proposal("coupled", "3x2")
    tree, _ = grown(a, model)
    for prefix, ids in children(tree).items():
        if ids:
            law = HostLogits(model.logits(prefix)[None]).law(0, LogitRow(SamplingState(a.slot.params, PROMPT, (0,))))
            left, position = law, len(PROMPT) + len(prefix)
            for token_id in ids:  # who wins where the ones before it are out
                assert token_id == coupled_id(left, a.slot.params, position)
                left = left.without(token_id)


@pytest.mark.parametrize("kind", ["greedy", "coupled"])
def test_the_best_nodes_are_the_likeliest_of_all_that_were_looked_at(kind: str) -> None:
    a = proposal(kind, "best:12x4")
    tree, _ = grown(a, Model(3))
    kept = {tree.prefix(node) for node in range(len(tree.ids))}
    probs = {node.prefix: node.path_prob for node in a.growth.nodes}
    assert kept < set(probs)
    assert min(probs[p] for p in kept) >= max(probs[p] for p in set(probs) - kept)


def test_siblings_of_rejection_are_drawn_without_replacement() -> None:
    """Over many seeds the second of two comes as often as from the law without the first."""
    law = HostLogits(Model(6).logits(())[None]).law(0, LogitRow(SamplingState(SamplingParams(), PROMPT, ())))
    best = int(law.scores.argmax())
    pairs = [tuple(grown(proposal("rejection", "2", seed), Model(6))[0].ids) for seed in range(1500)]
    law = grown(proposal("rejection", "2"), Model(6))[1][0]
    after_best = [second for first, second in pairs if first == best]
    expected = law.without(best).prob(int(law.without(best).scores.argmax()))
    found = np.mean([second == int(law.without(best).scores.argmax()) for second in after_best])
    assert len(after_best) > 100
    assert abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / len(after_best))


@pytest.mark.parametrize("cut_at", range(4))
def test_what_is_fed_goes_on_from_what_is_cached(cut_at: int) -> None:
    """Whatever was cut off meanwhile: nodes follow their parents, and the last rows are the frontier's."""
    a = proposal("greedy", "3x2x2x1")
    slot, growth, state, model = a.slot, a.growth, SamplingState(a.slot.params, PROMPT, (0,)), Model(8)
    for step in itertools.count():
        if step == cut_at:
            slot.truncate(len(PROMPT) - step)
        row = tree_row(slot, growth)
        nodes = [*slot.cached[:0], *growth.fed]
        assert row.num_logits == len(growth.frontier) and row.num_cached == len(slot.cached)
        assert row.num_cached + row.num_new == len(PROMPT) + len(nodes)
        paths = _paths([*slot.cached, *row.new_ids], row.parents)
        wanted = [(*PROMPT, *growth.prefix(node)) for node in growth.frontier]
        assert paths[-len(wanted) :] == wanted
        slot.fed(row.new_ids)
        grow_level(a, state, HostLogits(torch.stack([model.logits(growth.prefix(n)) for n in growth.frontier])), 0)
        if growth.done:
            break
    slot.forget_guesses()
    assert slot.cached == PROMPT


def _paths(ids: list[int], parents: Any) -> list[tuple[int, ...]]:
    """Of each token the sequence that it ends, as the runner reads a row."""
    start = len(ids) - len(parents or ())
    found = [tuple(ids[: i + 1]) for i in range(start)]
    for i, parent in enumerate(parents or ()):
        before = tuple(ids[:start]) if parent == -1 else found[start + parent]
        found.append((*before, ids[start + i]))
    return found
