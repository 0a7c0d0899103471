"""A proposal that is a tree: which draft token follows which. Host integers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1
"""Stands for the last committed token, where a node's index is asked for."""


@dataclass(frozen=True)
class DraftTree:
    """N draft tokens. A node comes after its parent, and siblings in the order in which they were drawn."""

    ids: tuple[int, ...]
    """[N]"""
    parents: tuple[int, ...]
    """[N]: of each node the index of its parent, or ROOT."""

    @classmethod
    def checked(cls, ids: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """Raises ValueError where a parent does not come before its child, or two siblings are the same token."""
        if len(ids) != len(parents):
            raise ValueError(f"{len(parents)} parents for {len(ids)} draft tokens")
        for node, parent in enumerate(parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parent of draft token {node} is {parent}, must be from {ROOT} to {node - 1}")
        tree = cls(tuple(ids), tuple(parents))
        for parent, children in tree._children.items():
            if len({ids[child] for child in children}) < len(children):
                raise ValueError(f"draft tokens {list(children)} follow {parent} and repeat an id")
        return tree

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        """In the order of first children."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Of each node the nodes that lead to it, itself the last."""
        found: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            found.append((node,) if parent == ROOT else (*found[parent], node))
        return tuple(found)

    @property
    def inner(self) -> tuple[int, ...]:
        """Nodes that have children, ROOT among them, in the order of their first children."""
        return tuple(self._children)

    def broods(self) -> list[list[int]]:
        """Of each of `inner` the ids of its children."""
        return [[self.ids[child] for child in children] for children in self._children.values()]

    def children(self, node: int) -> Sequence[int]:
        """Of a node or ROOT, in the order in which they were drawn."""
        return self._children.get(node, ())

    def depth(self, node: int) -> int:
        """Draft tokens up to it; 0 of ROOT."""
        return 0 if node == ROOT else len(self.paths[node])

    def prefix(self, node: int) -> tuple[int, ...]:
        """Draft ids up to a node, its own the last; none before ROOT."""
        return () if node == ROOT else tuple(self.ids[i] for i in self.paths[node])

    def rank(self, node: int) -> int:
        """Its place among its siblings."""
        return self.children(self.parents[node]).index(node)
