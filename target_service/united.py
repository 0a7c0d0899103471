"""Several sources in one tree: what drafts delivered, and a chain of the target's own beside it. Pure.

SpecInfer (Miao et al., ASPLOS 2024). Where drafts are walked as far as they match, the sources' trees are laid over
each other, and a step's share of the whole is chosen. Under `rejection` each draw is tested against the law of its own
source, in the order of the sources, the target's own last. A draw that is left out for its own value, or for that of
one that is tested after it, would change the law: so each source's share is chosen before anybody looks at what was
drawn. How long a chain is may follow from what it drew: a table's ends where nothing more is known to follow, and that
of a draft which is drafted for grows faster where it draws what was guessed. So a chain of which anything is here is
taken to be as long as it may be, alone, too. What two sources drew is one node and two draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from operator import mul

from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from target_service.lease import Candidate, Draft, Part, Source


def laid_over(parts: Sequence[Part], shares: Sequence[float], most: int, *, named: bool = False) -> list[Candidate]:
    """Merge the trees of several sources into one of at most `most` nodes, and return its nodes.

    shares: by source, how often the first token that it proposes after a node is accepted. Where earlier sources
    propose after the same node, the chances of a later one are scaled by what those leave. A token that several
    sources propose after one node becomes one node with the largest of their chances, which its descendants' chances
    are multiplied by.

    named: the request names the shape. The earlier sources then keep all their nodes and later ones get what is left,
    so that nothing learnt from other requests changes the tree. Otherwise the likeliest nodes are kept, best first.
    """
    drafts, parents, steps = list[Draft](), list[int](), list[float]()
    places = dict[tuple[int, int], int]()
    left = dict[int, float]()
    for part, share in zip(parts, shares, strict=True):
        own = list[int]()
        for chance, draft, parent in part.nodes:
            above, before = (ROOT, 1.0) if parent == ROOT else (own[parent], part.nodes[parent][0])
            step = chance / before * left.get(above, 1.0)
            node = places.setdefault((above, draft.token_id), len(drafts))
            if node == len(drafts):
                drafts.append(draft)
                parents.append(above)
                steps.append(step)
            steps[node] = max(steps[node], step)
            own.append(node)
        for above in {parents[node] for node in own}:
            left[above] = left.get(above, 1.0) * (1.0 - share)
    chances = list[float]()
    for parent, step in zip(parents, steps, strict=True):
        chances.append(step if parent == ROOT else chances[parent] * step)
    nodes = list(zip(chances, drafts, parents, strict=True))
    return nodes[:most] if named else _best_first(nodes)[:most]


def _best_first(nodes: Sequence[Candidate]) -> list[Candidate]:
    """Return the nodes in the order of their chances, parents before their children."""
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][0])
    places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
    return [(nodes[node][0], nodes[node][1], places[nodes[node][2]]) for node in order]


def in_turn(
    parts: Sequence[Part], shares: Sequence[float], most: int, *, named: bool = False
) -> list[tuple[float, int]]:
    """Return, best first, the chance of each of at most so many draws, and whose of the parts it is. named: as above.
    How many nodes a tree of a named shape has, may follow from what is drawn in it.
    """
    found, left = list[tuple[float, int]](), 1.0
    for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
        chances = [chance for chance, _, _ in part.nodes]
        if part.most:
            chances = list(accumulate(repeat(share, part.most), mul))
        found += [(left * chance, index) for chance in chances]
        left *= 1.0 - share
    return found[:most] if named else sorted(found, key=lambda each: -each[0])[:most]


def joined(parts: Sequence[Part]) -> DraftTree:
    """Return the tree of all, those of the first part first."""
    ids, parents, places = list[int](), list[int](), dict[tuple[int, int], int]()
    for part in parts:
        own = list[int]()
        for _, draft, parent in part.nodes:
            above = ROOT if parent == ROOT else own[parent]
            node = places.setdefault((above, draft.token_id), len(ids))
            if node == len(ids):
                ids.append(draft.token_id)
                parents.append(above)
            own.append(node)
    return DraftTree.of(ids, parents)


def said_in(tree: DraftTree, part: Part) -> dict[int, Draft]:
    """Return what a part says by the nodes of a tree, as far as it is there."""
    places, found = dict[int, int]({ROOT: ROOT}), dict[int, Draft]()
    for index, (_, draft, parent) in enumerate(part.nodes):
        node = tree.child(places[parent], draft.token_id) if parent in places else None
        if node is not None:
            places[index] = node
            found[node] = draft
    return found


def outcomes(
    tree: DraftTree, sources: Sequence[Source], path: Sequence[int], *, determined: bool
) -> Iterator[tuple[Source, int | None]]:
    """Yield what came of each source after each node of the path, the place of what came among what it says there, or
    None, as far as it was looked at: what stands before it did not come, which is all that earlier sources drew under
    `rejection`, and the likeliest of theirs where guesses are walked.
    """
    for depth, node in enumerate((ROOT, *path)):
        came, before = path[depth] if depth < len(path) else None, set[int]()
        for source in sources:
            said = {child for child in tree.children(node) if child in source.ranks}
            likeliest = {child for child in said if not determined or not source.ranks[child]}
            is_heard = not (determined and likeliest and likeliest <= before)
            if said and came not in before and is_heard:
                yield source, None if came is None else source.ranks.get(came)
            before |= likeliest
