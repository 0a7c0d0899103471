"""The live beams of one slot as a token tree behind its committed tokens, in the target and in its draft workers. Pure.

Tokens that all live beams begin with are settled: they are committed, and the tree begins behind them. A node on the
way to a live beam stays in the cache where it was fed; all others may go. Draft tokens follow the live beams.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from outrider.engine.speculation.beam import Level
from outrider.engine.speculation.cached_tree import CachedTree
from outrider.engine.speculation.draft_tree import ROOT


class BeamTree(CachedTree):
    """Begins with one beam, the prompt. ROOT is the last settled token, and a live beam itself while there is one."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        super().__init__()
        self.num_settled = len(prompt_ids)
        """Number of tokens that all live beams begin with."""
        self.live: list[int] = [ROOT]
        """The last token of each live beam, best first."""
        self.live_at: dict[int, Sequence[int | None]] = {self.length: [ROOT]}
        """By length that is not settled, the last tokens of the beams that were live then; None: no beam goes on
        there."""

    @property
    def live_depth(self) -> int:
        """Number of tokens of each live beam that are not settled."""
        return self.depth(self.live[0])

    @property
    def length(self) -> int:
        """Number of tokens of each live beam, those of the prompt included."""
        return self.num_settled + self.live_depth

    def advance(self, levels: Sequence[Level]) -> Sequence[int]:
        """Go on with the beams of these levels, each of which has some; return the ids that are settled now."""
        for level in levels:
            live = list[int]()
            for parent, token_id, _ in level.live:
                live.append(self.find_or_add(self.live[parent], token_id))
            self.live = live
            self.live_at[self.length] = live
        path = {ROOT, *self.inner(), *self.live}
        dropped = set[int]()
        for node, parent in enumerate(self.parents):
            if node not in path and parent in path and parent not in self.live:
                dropped.add(node)
        root = ROOT
        while root not in self.live:
            following = [child for child in self.children(root) if child in path]
            if len(following) > 1:
                break
            root = following[0]
        settled_ids = self.prefix(root)
        self.reroot(root, dropped)
        return settled_ids

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        settled = self.path(node)
        kept = super().reroot(node, dropped)
        self.num_settled += len(settled)
        new_index: dict[int | None, int] = {**dict.fromkeys([ROOT, *settled], ROOT), **kept}
        self.live = [new_index[each] for each in self.live]
        for length, nodes in list(self.live_at.items()):
            self.live_at[length] = [new_index.get(each) for each in nodes]
            if length < self.num_settled:
                del self.live_at[length]
        return kept

    def find_or_add(self, node: int, token_id: int) -> int:
        """Return the child of a node that is this token, added where there is none yet."""
        child = self.child(node, token_id)
        return self.add(node, token_id) if child is None else child

    def inner(self) -> list[int]:
        """Return the nodes between the root and the live beams' last tokens, parents first."""
        found = set[int]()
        for leaf in self.live:
            node = ROOT if leaf == ROOT else self.parents[leaf]
            while node != ROOT and node not in found:
                found.add(node)
                node = self.parents[node]
        return sorted(found)

    def drafts(self) -> list[int]:
        """Return the nodes below the live beams: all draft tokens."""
        live_depth = self.live_depth
        return [node for node, depth in enumerate(self.depths) if depth > live_depth]

    def unfed(self, nodes: Sequence[int]) -> list[int]:
        """Return those of some nodes that are not in the cache; not the root."""
        fed = {ROOT, *self.fed}
        return [node for node in nodes if node not in fed]

    def parents_of(self, new: Sequence[int], root_at: int) -> list[int]:
        """Return the parents of the fed nodes and then of the new ones, as nodes of a row's tree, in which the root is
        node `root_at` and these follow it in order.
        """
        place_of = {ROOT: root_at}
        parents = list[int]()
        for node in (*self.fed, *new):
            parents.append(place_of[self.parents[node]])
            place_of[node] = root_at + len(parents)
        return parents
