"""The live beams of one slot as a token tree after its committed tokens, in the target and in its draft workers. Pure.

Tokens that all live beams share at their beginning are settled: they are committed, and the tree begins after them.
Draft tokens are nodes below the live beams' last tokens. Nodes on the path to a live beam stay in the cache; others may
leave it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from outrider.engine.speculation.beam import BeamLevel
from outrider.engine.speculation.draft_tree import ROOT, CachedTree


class BeamTree(CachedTree):
    """Tree of the live beams of one search. At first there is one beam, the prompt. ROOT is the last settled token,
    i.e. the last one that all live beams share.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        super().__init__()
        self.num_settled = len(prompt_ids)
        """Number of tokens, with the prompt, that all live beams share at their beginning."""
        self.active: list[int] = [ROOT]
        """Node of each live beam's last token, best first; [ROOT] while the only beam has no token after ROOT."""
        self.active_at: dict[int, Sequence[int | None]] = {self.length: [ROOT]}
        """active_at[length][b]: node of the last token of live beam b at the time when beams had `length` tokens,
        prompt included; None if no live beam continues that beam any more. Lengths go from the number of tokens that
        all live beams share (`num_settled`) to the present one."""

    @property
    def active_depth(self) -> int:
        """Number of tokens of each live beam after the tokens that all live beams share."""
        return self.depth(self.active[0])

    @property
    def length(self) -> int:
        """Number of tokens of each live beam, including the prompt."""
        return self.num_settled + self.active_depth

    def advance(self, levels: Sequence[BeamLevel]) -> Sequence[int]:
        """Advance to the live beams after these levels. Return the ids that become settled, i.e. the tokens that all
        live beams now share. Each level must have a non-empty `active`.

            live [a, b] with children c, d of a; a level continues a with c and with d: a is settled, live is [c, d]
        """
        for level in levels:
            active = list[int]()
            for parent, token_id, _ in level.active:
                active.append(self.find_or_add(self.active[parent], token_id))
            self.active = active
            self.active_at[self.length] = active
        path = {ROOT, *self.inner(), *self.active}
        dropped = set[int]()
        for node, parent in enumerate(self.parents):
            if node not in path and parent in path and parent not in self.active:
                dropped.add(node)
        root = ROOT
        while root not in self.active:
            children = [child for child in self.children(root) if child in path]
            if len(children) > 1:
                break
            root = children[0]
        settled_ids = self.prefix(root)
        self.reroot(root, dropped)
        return settled_ids

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        settled = self.path(node)
        kept = super().reroot(node, dropped)
        self.num_settled += len(settled)
        new_index: dict[int | None, int] = {**dict.fromkeys([ROOT, *settled], ROOT), **kept}
        self.active = [new_index[leaf] for leaf in self.active]
        for length, nodes in list(self.active_at.items()):
            self.active_at[length] = [new_index.get(leaf) for leaf in nodes]
            if length < self.num_settled:
                del self.active_at[length]
        return kept

    def find_or_add(self, node: int, token_id: int) -> int:
        """Return the child of a node or ROOT with this token id; add it if there is none."""
        child = self.child(node, token_id)
        if child is None:
            child = self.add(node, token_id)
        return child

    def inner(self) -> list[int]:
        """Return the nodes between ROOT and the last tokens of the live beams, both excluded, parents first."""
        found = set[int]()
        for leaf in self.active:
            node = ROOT
            if leaf != ROOT:
                node = self.parents[leaf]
            while node != ROOT and node not in found:
                found.add(node)
                node = self.parents[node]
        return sorted(found)

    def drafts(self) -> list[int]:
        """Return the nodes below the live beams; these are all draft tokens."""
        active_depth = self.active_depth
        return [node for node, depth in enumerate(self.depths) if depth > active_depth]

    def unfed(self, nodes: Sequence[int]) -> list[int]:
        """Return those of the given nodes that are not in the cache. ROOT is left out."""
        fed = {ROOT, *self.fed}
        return [node for node in nodes if node not in fed]

    def parents_of(self, new: Sequence[int], root_at: int) -> list[int]:
        """Return the index of each node's parent in the row that feeds the nodes `new`: first for the nodes in the
        cache, then for `new`.

        root_at: index of the root among the row's tokens; the nodes follow it in this order.

            root_at 1, fed [a], new [b, c] with b after the root and c after a: [1, 1, 2], for a is token 2 of the row
        """
        index_of = {ROOT: root_at}
        parents = list[int]()
        for node in (*self.fed, *new):
            parents.append(index_of[self.parents[node]])
            index_of[node] = root_at + len(parents)
        return parents
