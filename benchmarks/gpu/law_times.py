"""Section `law-times`: how long the target takes to decide a step, by rule and slots, at a vocabulary of 128,256."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.bandwidth import median_s
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.steps import MAX_ROUNDS
from outrider.engine.native.library import load_at_start
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal
from target_service.step.decide import decide
from tests.proposals import PlainSlot, chain_proposal, tree_draws

VOCAB = 128_256
K = 4
PARENTS = (-1, -1, 0, 0)
"""Of a tree of 4: two siblings, and two below the first."""
PROMPT = tuple(range(100))
TOPK = 128
"""Entries of a cut distribution, as it travels."""
BUDGET_S = 0.25
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "rejection, T = 1": {},
    "rejection, cut": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "by token (lenience .8)": {"lenience": 0.8},
    "coupled": {"acceptance": AcceptanceRule.COUPLED},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "log-probs, greedy": {"temperature": 0.0, "num_logprobs": 5},
}


def run(bench: Bench) -> None:
    vocab = bench.size(VOCAB, 1000)
    device = torch.device(bench.device)
    slowest = ("", 0.0)
    load_at_start()  # as a worker does: without it the host's noise is made in NumPy
    for batch in bench.size((1, 32, 8), (1, 2)):
        torch.manual_seed(0)
        logits = torch.randn(batch * (K + 1), vocab, device=device)
        for shape in ("chain", "tree"):
            for name, sampling in RULES.items():
                if shape == "tree" and "lenience" in sampling:
                    continue
                decide_all = decision(batch, vocab, shape == "tree", logits, sampling)
                try:
                    with _as_on_a_device():
                        elapsed_s = median_s(decide_all, device, MAX_ROUNDS, BUDGET_S)
                except Exception as error:  # one rule that fails leaves the others
                    bench.find(f"{name} of a {shape}, {batch} slots: {type(error).__name__}: {error}")
                    continue
                bench.tell("law", slots=batch, shape=f"{shape} of {K}", rule=name, ms=1e3 * elapsed_s)
                if elapsed_s > slowest[1]:
                    slowest = (f"{name} of a {shape}, {batch} slots", elapsed_s)
        bench.sum_up(f"slowest: {slowest[0]}, {1e3 * slowest[1]:.1f} ms")


def _as_on_a_device() -> AbstractContextManager[object]:
    """Have decisions take a device's code in a rehearsal, too."""
    return mock.patch.object(HostLogits, "is_on_host", staticmethod(lambda logits: False))


def decision(
    batch: int, vocab: int, is_tree: bool, logits: torch.Tensor, sampling: dict[str, Any]
) -> Callable[[], object]:
    """Return what decides a step of `batch` slots that verify K draft tokens each."""
    params = SamplingParams(max_tokens=64, seed=3, **sampling)
    ready = [_ready(params, vocab, is_tree, slot) for slot in range(batch)]
    states = [SamplingState(params, PROMPT, (2,)) for _ in ready]

    @torch.inference_mode()
    def decide_all() -> object:
        return decide(ready, states, logits)

    return decide_all


def _ready(params: SamplingParams, vocab: int, is_tree: bool, slot: int) -> Proposal:
    numbers = np.random.default_rng(slot)
    num = min(TOPK, vocab // 2)
    ids = np.sort(numbers.choice(vocab, num, replace=False))
    law = TokenDistribution(vocab, np.log(np.full(num, 1 / num, np.float32)), ids)
    draft_ids = [int(ids[index]) for index in range(K)]
    own: Any = PlainSlot(params, list(PROMPT))
    if not is_tree:
        return chain_proposal(own, draft_ids, None if params.is_deterministic else [law] * K)
    tree = DraftTree.of(draft_ids, PARENTS)
    if params.is_deterministic:
        return Proposal(own, tree)
    draws = tree_draws({parent: [(law, tree.children(parent))] for parent in (ROOT, 0)})
    return Proposal(own, tree, draws)
