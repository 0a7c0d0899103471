"""A draft and a target worker with trees between them, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.wire.kinds import AcceptanceRule
from outrider.wire.params import SamplingParams
from outrider.wire.tree_shape import TreeShape
from tests.engine.cuda_pair import Pair, tiny_pair

PROMPT = [12, 7, 99, 4, 31]
NUM_ROUNDS = 6
ON_A_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {**SEEDED, "acceptance": AcceptanceRule.COUPLED},
    "rejection": SEEDED,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return tiny_pair(tmp_path_factory.mktemp("trees"))


def answered(pair: Pair, slot: int, params: SamplingParams, tree: TreeShape | None) -> tuple[list[int], int]:
    """What was said in NUM_ROUNDS, and how many drafts were kept."""
    pair.open(slot, PROMPT, params)
    ids, num_kept = list(PROMPT), 0
    for _ in range(NUM_ROUNDS):
        (verdict,) = pair.round({slot: ids}, 3 if tree is None else tree.most_nodes, tree=tree)
        ids.extend(verdict.token_ids)
        branches = any(len(set(parents)) < len(parents) for parents in pair.parents)
        assert branches is (tree is not None)
        num_kept += verdict.num_accepted
    return ids[len(PROMPT) :], num_kept


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("path", ["paged", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_trees_are_grown_and_verified(
    monkeypatch: pytest.MonkeyPatch, models: tuple[str, str], device: str, path: str, case: str
) -> None:
    """The logits of a GPU are not the host's to read."""
    settings = {"device": device, "dtype": "float32", "attention_path": path, "max_slots": 3, "kv_cache_tokens": 4096}
    pair = Pair(monkeypatch, *models, **settings)
    params = SamplingParams(max_tokens=60, ignore_eos=True, **CASES[case])
    chain, _ = answered(pair, 1, params, None)
    for slot, shape in enumerate(("2x2x1", "best:6x3"), start=2):
        ids, num_kept = answered(pair, slot, params, TreeShape.parse(shape))
        assert num_kept
        if case != "rejection":  # the text is the target's, whatever was drafted
            shared = min(len(ids), len(chain))
            assert ids[:shared] == chain[:shared]
