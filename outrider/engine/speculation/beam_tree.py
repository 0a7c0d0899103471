"""The live beams of one slot as a token tree behind its committed tokens, in the target and in its drafts. Pure.

What all live beams begin with is settled: it is committed, and the tree begins behind it. A node that lies on the way
to a live beam stays in the cache where it was fed; everything else may go. Drafts hang below the live beams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.engine.speculation.beam import Level
from outrider.engine.speculation.tree import Node


class BeamTree:
    """Begins with one beam, the prompt."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.root = Node(prompt_ids[-1], len(prompt_ids) - 1, None)
        """The last settled token. It is a live beam itself where there is one alone."""
        self.live: list[Node] = [self.root]
        """The last token of each live beam, best first."""
        self.sums: tuple[float, ...] = (0.0,)
        """Their sums of log-probs, in nats."""
        self.length = len(prompt_ids)
        """Tokens of each live beam, the prompt's among them."""
        self.fed: list[Node] = []
        """Nodes in the cache, in order, behind the settled tokens."""
        self._live_at: dict[int, list[Node]] = {self.length: self.live}  # by length, while not all of it is settled
        self._settled: list[Node] = []  # since `keep` was called last

    @property
    def num_settled(self) -> int:
        """Number of tokens that all live beams begin with."""
        return self.root.position + 1

    def live_at(self, length: int) -> Sequence[Node]:
        """Return the last tokens of the beams that were live at a length; none where that is settled or to come."""
        return self._live_at.get(length, ())

    def advance(self, levels: Sequence[Level]) -> list[int]:
        """Go on with the beams of these levels, each of which has some; return the ids that are settled now."""
        for level in levels:
            self.live = [self.child(self.live[parent], token_id) for parent, token_id, _ in level.live]
            self.sums = tuple(total for _, _, total in level.live)
            self.length += 1
            self._live_at[self.length] = self.live
        inner = self.inner()
        on_path = {id(node) for node in (*inner, *self.live)}
        for node in (self.root, *inner):
            if node not in self.live:
                node.children = [child for child in node.children if id(child) in on_path]
        settled = list[Node]()
        while self.root not in self.live and len(self.root.children) == 1:
            self.root = self.root.children[0]
            settled.append(self.root)
        self.root.parent = None
        for length in [length for length in self._live_at if length < self.num_settled]:
            del self._live_at[length]
        self._settled += settled
        return [node.token_id for node in settled]

    def child(self, node: Node, token_id: int) -> Node:
        """Return a child of a node, made where there is none yet."""
        for child in node.children:
            if child.token_id == token_id:
                return child
        made = Node(token_id, node.position + 1, node)
        node.children.append(made)
        return made

    def inner(self) -> list[Node]:
        """Return the nodes between the root and the live beams' last tokens, parents first."""
        found: dict[int, Node] = {}
        for leaf in self.live:
            node = leaf.parent if leaf is not self.root else None
            while node is not None and node is not self.root and id(node) not in found:
                found[id(node)] = node
                node = node.parent
        return sorted(found.values(), key=lambda node: node.position)

    def unfed(self) -> list[Node]:
        """Return the nodes up to the live beams' last tokens that are not in the cache, parents first; not the root."""
        return [node for node in (*self.inner(), *self.live) if not node.is_fed and node is not self.root]

    def feed(self, node: Node) -> None:
        """Note that a node lies in the cache behind all that was fed before."""
        node.is_fed = True
        if node is not self.root:
            self.fed.append(node)

    def keep(self, nodes: Iterable[Node]) -> list[int]:
        """Let all fed nodes go but these and those settled now. Return which of `fed` stay in the cache, as ascending
        indices: the settled ones come first, and are no nodes any more.
        """
        stays = {id(node) for node in nodes}
        settled = {id(node) for node in self._settled}
        indices = [place for place, node in enumerate(self.fed) if id(node) in stays or id(node) in settled]
        left = [self.fed[place] for place in indices]
        for node in self.fed:
            node.is_fed = False
        for node in left:
            node.is_fed = True
        self.fed, self._settled = [node for node in left if id(node) not in settled], []
        return indices

    def forget_cache(self) -> None:
        """Note that nothing of it is in the cache any more."""
        for node in (self.root, *self.fed):
            node.is_fed = False
        self.fed, self._settled = [], []

    def parents_of(self, new: Sequence[Node], root_at: int) -> list[int]:
        """Return the parents of what was fed and then of the new nodes, by their place in that order behind the root,
        which is node `root_at` of the row's tree.
        """
        place = {id(self.root): root_at}
        parents = list[int]()
        for index, node in enumerate((*self.fed, *new), start=root_at + 1):
            parents.append(place[id(node.parent)])
            place[id(node)] = index
        return parents
