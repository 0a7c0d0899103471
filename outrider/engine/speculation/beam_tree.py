"""The live beams of one slot as a token tree behind its committed tokens, in the target and in its draft workers. Pure.

What all live beams begin with is settled: it is committed, and the tree begins behind it. A node on the way to a live
beam stays in the cache where it was fed; all others may go. Draft tokens follow the live beams.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self.sums: tuple[float, ...] = (0.0,)
        """Their sums of log-probs, in nats."""
        self.length = len(prompt_ids)
        """Tokens of each live beam, the prompt's among them."""
        self._live_at: dict[int, list[int | None]] = {self.length: [ROOT]}  # by length, while not all of it is settled

    def live_at(self, length: int) -> Sequence[int | None]:
        """Return the last tokens of the beams that were live at a length, None for one of which none is left; nothing
        where all are settled or to come.
        """
        return self._live_at.get(length, ())

    def advance(self, levels: Sequence[Level]) -> list[int]:
        """Go on with the beams of these levels, each of which has some; return the ids that are settled now."""
        for level in levels:
            live = list[int]()
            for parent, token_id, _ in level.live:
                live.append(self.find_or_add(self.live[parent], token_id))
            self.live = live
            self.sums = tuple(total for _, _, total in level.live)
            self.length += 1
            self._live_at[self.length] = list(live)
        path = {ROOT, *self.inner(), *self.live}
        dropped = set[int]()
        for node, parent in enumerate(self.parents):
            if node not in path and parent in path and parent not in self.live:
                dropped.add(node)
        return self._settle(path, dropped)

    def _settle(self, path: set[int], dropped: set[int]) -> list[int]:
        """Begin behind what all live beams begin with, without the dropped nodes and theirs; return its ids."""
        root = ROOT
        while root not in self.live:
            following = [child for child in self.children(root) if child in path]
            if len(following) > 1:
                break
            root = following[0]
        settled = self.path(root)
        ids = [self.ids[node] for node in settled]
        new_index: dict[int | None, int] = dict.fromkeys([ROOT, *settled], ROOT)
        for new, old in enumerate(self.reroot(root, dropped)):
            new_index[old] = new
        self.num_settled += len(ids)
        self.live = [new_index[node] for node in self.live]
        for length, nodes in list(self._live_at.items()):
            self._live_at[length] = [new_index.get(node) for node in nodes]
            if length < self.num_settled:
                del self._live_at[length]
        return ids

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

    def unfed(self) -> list[int]:
        """Return the nodes up to the live beams' last tokens that are not in the cache, parents first; not the root."""
        fed = {ROOT, *self.fed}
        return [node for node in (*self.inner(), *self.live) if node not in fed]

    def parents_of(self, new: Sequence[int], root_at: int) -> list[int]:
        """Return the parents of what was fed and then of the new nodes, by their place in that order behind the root,
        which is node `root_at` of the row's tree.
        """
        place_of = {ROOT: root_at}
        parents = list[int]()
        for node in (*self.fed, *new):
            parents.append(place_of[self.parents[node]])
            place_of[node] = root_at + len(parents)
        return parents
