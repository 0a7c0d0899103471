"""Draft tokens of one slot that a step might verify: what every drafter hands over, before a budget takes its part. Pure.

A budget takes *offers* in their order, as many as pay. Under `rejection` nothing that was sampled may decide how many:
a chain that ended early has as many offers as it might have had tokens, and each offer's acceptance probability follows
from its place alone. So an offer may bring no token.

    a chain "cat sat", which might have been three tokens long, of a drafter whose tokens are accepted in half of all cases:
        tree    cat -> sat
        tokens  (cat, offer 0), (sat, offer 1)
        probs   0.5, 0.25, 0.125
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.speculation.ranks import SlotShares
from outrider.wire.kinds import Drafter
from outrider.wire.transport.codec import Rows

EncodedDistribution = tuple[Rows, int]
"""Distributions of a delivery as they came over the wire, and the index of one of them."""


@dataclass(eq=False, slots=True)
class DraftSource:
    """Who drafts for a slot: a drafter of the target's own, or what a draft worker delivers."""

    drafter: Drafter
    """Its name; that of a draft worker is MODEL."""
    shares: SlotShares
    """How often its draft tokens are accepted."""


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A node as one drafter proposes it."""

    node: int
    source: int
    """Index of the drafter among `Candidates.sources`."""
    rank: int
    """Order among the drafter's own tokens after the same parent, the likeliest or first sampled one 0."""
    offer: int
    """The offer that brings it."""
    distribution: RowLaw | EncodedDistribution | None
    """What it was sampled from, as its siblings of the same drafter before it left it; None: deterministic."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a slot's step might verify. Falsy where that is nothing."""

    sources: Sequence[DraftSource]
    """In the order in which draws are tested."""
    tree: DraftTree
    tokens: Sequence[DraftToken]
    """By source, and of each in the order in which it proposed them."""
    probs: Sequence[float]
    """Acceptance probability of each offer, best first where the request names no number."""

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def first(self, num_offers: int) -> Candidates:
        """Return what the first so many offers bring."""
        if num_offers >= len(self.probs):
            return self
        taken = [token for token in self.tokens if token.offer < num_offers]
        nodes = sorted({token.node for token in taken})
        index_of = {node: index for index, node in enumerate(nodes)}
        tokens = [
            DraftToken(index_of[token.node], token.source, token.rank, token.offer, token.distribution)
            for token in taken
        ]
        return Candidates(self.sources, self.tree.select(nodes), tokens, self.probs[:num_offers])


def candidates_of(
    source: DraftSource,
    tree: DraftTree,
    distributions: Sequence[RowLaw | EncodedDistribution | None],
    max_len: int | None = None,
) -> Candidates:
    """Return the candidates of one drafter, a token a node.

    distributions: [N], of each node. max_len: of a sampled chain, how long it might have been; None: as long as it is,
    with the acceptance probabilities that the tree has.
    """
    tokens = [
        DraftToken(node, 0, tree.ranks[node], node, distribution) for node, distribution in enumerate(distributions)
    ]
    if max_len is None:
        return Candidates([source], tree, tokens, tree.probs)
    return Candidates([source], tree, tokens, chain_probs(source.shares.share(0), max_len))


def chain_probs(prob: float, num_tokens: int) -> list[float]:
    """Return the acceptance probabilities of a chain's tokens, each of which is accepted with `prob` after the last."""
    probs = list[float]()
    left = 1.0
    for _ in range(num_tokens):
        left *= prob
        probs.append(left)
    return probs
