"""A draft's tree that grows, over laws without a model."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.growing_tree import GrowingTree
from outrider.engine.speculation.growth import GrowthSetup
from outrider.engine.speculation.node_drafter import NodeDistribution
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.plan import MAX_FED
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.worker.open_slots import BareSlot
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import MAX_DRAFT_TOKENS, SamplingParams
from outrider.wire.requests.speculation import Speculation

VOCAB_SIZE = 24
PROMPT = [1, 2, 3]
MAX_TOKENS = 200
AUTO = Speculation(max_draft_tokens=16)
REJECTION: dict[str, Any] = {"temperature": 1.0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED}
RULES = pytest.mark.parametrize("rule", [{}, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])


class Draft:
    """A model whose logits are a function of all tokens before, with a tree that grows by it."""

    def __init__(
        self,
        committed: Sequence[int] = PROMPT,
        speculation: Speculation = AUTO,
        *,
        supports_trees: bool = True,
        is_block_drafter: bool = False,
        scale: float = 2.0,
        world: int = 0,
        max_tokens: int = MAX_TOKENS,
        vocab_size: int = VOCAB_SIZE,
        max_fed: int = MAX_FED,
        **options: Any,
    ) -> None:
        self.params = SamplingParams(**{"temperature": 0.0, "seed": 5, "max_tokens": max_tokens, **options})
        self.committed, self.scale, self.world = list(committed), scale, world
        self.vocab_size = vocab_size
        self.state = SamplingState(self.params, PROMPT, [])
        self.shares = SlotAcceptance(RankAcceptance())
        self.slot = BareSlot((1, 1), self.committed, len(PROMPT), self.params)
        drafter: Any = SimpleNamespace(
            supports_trees=supports_trees, is_block_drafter=is_block_drafter, max_depth=MAX_DRAFT_TOKENS
        )
        self.tree = GrowingTree(GrowthSetup(self.slot, speculation, self.shares, drafter, None, max_fed, ()))
        self.order: list[int] = []
        """Nodes and ROOT as they were fed, before anything was committed."""

    def law(self, row: LogitRow) -> TokenDistribution:
        key = [self.world, *self.committed, *row.draft_prefix]
        scores = np.random.default_rng(key).normal(0.0, self.scale, self.vocab_size).astype(np.float32)
        scores -= scores.max()
        return TokenDistribution(self.vocab_size, scores - np.float32(np.log(np.exp(scores).sum())))

    def best(self, row: LogitRow, num: int) -> tuple[list[int], list[float]]:
        probs = self.law(row).probs()
        ids = np.argsort(-probs, kind="stable")[:num]
        return ids.tolist(), probs[ids].tolist()

    def grow(self, num_steps: int = 1000, most: int = 4) -> "Draft":
        for _ in range(num_steps):
            offers = self.tree.candidates(most)
            if not offers:
                break
            for _, node in offers:
                self.tree.feed(node)
                self.order.append(node)
            said = [NodeDistribution(self.tree, node, self.state, self.law, self.best) for _, node in offers]
            assert not grow(said)
        return self

    def commit(self, ids: Sequence[int]) -> list[int]:
        self.committed += ids
        return self.tree.commit_decided(ids)

    def kinds_after(self, node: int, kind: NodeKind) -> list[int]:
        return [child for child in self.tree.children(node) if self.tree.kinds[child] is kind]

    def key_of(self, node: int) -> int:
        return self.kinds_after(node, NodeKind.RECOVERY)[0]

    def law_of(self, node: int) -> int:
        return self.kinds_after(node, NodeKind.SAMPLED)[0]

    def ids_after(self, node: int) -> list[int]:
        return [self.tree.ids[child] for child in self.tree.children(node)]

    def chain(self, node: int = ROOT) -> list[tuple[int, int]]:
        """The LAW nodes in a row: ids and where their segment began."""
        found = list[tuple[int, int]]()
        while drawn := self.kinds_after(node, NodeKind.SAMPLED):
            node = drawn[0]
            found.append((self.tree.ids[node], self.tree.segments[node][0]))
        return found

    def drawn(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """By path of ids: which LAW nodes follow, all within the root's segment."""
        queue, found = [ROOT], dict[tuple[int, ...], tuple[int, ...]]()
        for node in queue:
            laws = self.kinds_after(node, NodeKind.SAMPLED)
            if laws:
                found[self.tree.prefix(node)] = tuple(self.tree.ids[child] for child in laws)
            queue += laws
        return found
