"""Two sources in one tree: what a draft delivered, and a chain of the target's own beside it. Pure.

SpecInfer (Miao et al., ASPLOS 2024). Where drafts are walked as far as they match, the sources' trees are laid over
each other, and a step's share of the whole is chosen. Under `rejection` each draw is tested against the law of its own
source, what was delivered first. A draw that is left out for its own value, or for that of one that is tested after
it, would change the law: so each source's share is chosen before anybody looks at what the chain holds, as though it
were as long as it may be, and what both drew is one node and two draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree
from outrider.engine.speculation.ranks import SlotShares
from target_service.lease import Candidate, Sources


@dataclass(frozen=True, slots=True)
class Chances:
    """How often what each source says comes."""

    delivered: float
    """The first of what was delivered after a node."""
    own: float
    """What the chain says, where that does not."""

    def of_chain(self, *, beside: bool) -> float:
        """Return the chance of what the chain says after a node: alone, or beside what was delivered there."""
        return self.own * (1.0 - self.delivered) if beside else self.own


def laid_over(
    delivered: Sequence[Candidate], chain: Sequence[Candidate], chances: Chances, most: int
) -> list[Candidate]:
    """Return the tree of both, best first, of at most so many guesses. What both say is one guess, as likely as the
    likelier of the two has it, and what was delivered behind it is the likelier by as much.
    """
    places = {(parent, draft.token_id): node for node, (_, draft, parent) in enumerate(delivered)}
    parents = {parent for _, _, parent in delivered}
    raised, added = dict[int, float](), list[Candidate]()
    at, chance, times = ROOT, 1.0, 1.0
    for _, draft, _ in chain:
        chance *= chances.of_chain(beside=at in parents)
        node = places.get((at, draft.token_id))
        if node is None:
            added.append((chance, draft, at))
            at = len(delivered) + len(added) - 1
            continue
        here = times * delivered[node][0]
        chance = max(chance, here)
        times *= chance / here
        raised[node], at = times, node
    factors, nodes = list[float](), list[Candidate]()
    for node, (before, draft, parent) in enumerate(delivered):
        factors.append(raised.get(node, 1.0 if parent == ROOT else factors[parent]))
        nodes.append((before * factors[node], draft, parent))
    return _best_first([*nodes, *added])[:most]


def _best_first(nodes: Sequence[Candidate]) -> list[Candidate]:
    """Return the nodes in the order of their chances, parents before their children."""
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][0])
    places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
    return [(nodes[node][0], nodes[node][1], places[nodes[node][2]]) for node in order]


def in_turn(delivered: Sequence[Candidate], num_own: int, chances: Chances, most: int) -> list[tuple[float, bool]]:
    """Return, best first, the chance of each of at most so many draws, and whether it is the chain's. num_own: how long
    that may be, whatever it holds.
    """
    own = accumulate(repeat(chances.own, num_own - 1), mul, initial=chances.of_chain(beside=True))
    both = [*((chance, False) for chance, _, _ in delivered), *((chance, True) for chance in own)]
    return sorted(both, key=lambda each: -each[0])[:most]


def joined(delivered: Sequence[Candidate], chain: Sequence[Candidate]) -> DraftTree:
    """Return the tree of both, those that were delivered first."""
    ids, parents = [draft.token_id for _, draft, _ in delivered], [parent for _, _, parent in delivered]
    places, at = {key: node for node, key in enumerate(zip(parents, ids, strict=True))}, ROOT
    for _, draft, _ in chain:
        node = places.setdefault((at, draft.token_id), len(ids))
        if node == len(ids):
            ids.append(draft.token_id)
            parents.append(at)
        at = node
    return DraftTree.checked(ids, parents)


def along(tree: DraftTree, chain: Sequence[Candidate]) -> tuple[int, ...]:
    """Return the nodes of a tree that a chain says, as far as they are there."""
    nodes, at = list[int](), ROOT
    for _, draft, _ in chain:
        node = tree.child(at, draft.token_id)
        if node is None:
            break
        nodes.append(node)
        at = node
    return tuple(nodes)


def note_outcome(
    tree: DraftTree,
    sources: Sources,
    path: Sequence[int],
    delivered: SlotShares,
    own: SlotShares,
    *,
    determined: bool,
) -> None:
    """Record what came of each source, as far as it was looked at: the chain's is where nothing came that stands before
    it, the likeliest that was delivered or, under `rejection`, all of it, which is tested first. Where guesses are
    walked, what a draft delivered is noted elsewhere, and what both say counts as the draft's.
    """
    for depth, node in enumerate((ROOT, *path)):
        came = path[depth] if depth < len(path) else None
        before = [child for child in tree.children(node) if child in sources.ranks]
        if determined:
            before = [child for child in before if not sources.ranks[child]]
        elif before:
            delivered.note(sources.ranks[came] if came in before and came is not None else None)
        is_followed = depth < len(sources.own) and sources.own[:depth] == tuple(path[:depth])
        if not is_followed or came in before or (determined and sources.own[depth] in before):
            continue
        own.note(0 if came == sources.own[depth] else None)
