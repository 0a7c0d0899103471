"""A draft tree of which some nodes lie in a worker's cache, in the order in which they were fed. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from outrider.engine.speculation.draft_tree import ROOT, DraftTree

GONE = ROOT - 1
"""Stands for a fed node that is dropped."""


class CachedTree(DraftTree):
    """Its cache holds all committed tokens, ROOT once it is fed the last, and then `fed`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_root_fed = False
        self.fed: list[int] = []
        """Nodes in the cache, in order. Until `keep` is called, ROOT for one that is committed since, and GONE for one
        that is dropped."""

    def feed(self, node: int) -> None:
        """Record that a node, or ROOT, lies in the cache behind all that was fed before."""
        if node == ROOT:
            self.is_root_fed = True
        else:
            self.fed.append(node)

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        path = self.path(node)
        if path:
            self.is_root_fed = node in self.fed
        new_index = super().reroot(node, dropped)
        index_of = dict.fromkeys([ROOT, *path], ROOT) | new_index
        self.fed = [index_of.get(each, GONE) for each in self.fed]
        return new_index

    def keep(self, nodes: Iterable[int]) -> list[int]:
        """Drop all fed nodes but these and those that are committed. Return which of `fed` stay in the cache, as
        ascending indices: the committed ones come first, and are no nodes any more.
        """
        stays = {ROOT, *nodes}
        indices = [index for index, node in enumerate(self.fed) if node in stays]
        self.fed = [node for node in self.fed if node in stays and node != ROOT]
        return indices

    def forget_cache(self) -> None:
        """Record that nothing of it is in the cache any more."""
        self.is_root_fed = False
        self.fed = []
