"""Token trees on the host: which token follows which, and hence its position and what a query sees.

A tree is given by its parents: for every node the index of the one it follows, -1 for the token before the tree. A
parent comes before its children. Nodes lie in the cache in this order, after the tokens before the tree; a node sees
those, its ancestors and itself, and its position is that of a chain that ends with it (SpecInfer, 2305.09781, 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def check_parents(parents: Sequence[int]) -> None:
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, f"node {node} of a tree follows node {parent}"


def check_path(parents: Sequence[int], path: Sequence[int]) -> None:
    """Assert that each node of `path` follows the one before it, and the first the token before the tree."""
    for node, before in zip(path, [-1, *path], strict=False):
        assert 0 <= node < len(parents) and parents[node] == before, f"{list(path)} is no path of {list(parents)}"


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many ancestors each node has."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def positions(num_tokens: int, parents: Sequence[int] | None) -> np.ndarray:
    """Return the positions, [num_tokens] int64, of a sequence that ends with a tree; parents None for a chain."""
    if parents is None:
        return np.arange(num_tokens)
    start = num_tokens - len(parents)
    return np.concatenate([np.arange(start), start + np.array(depths(parents), dtype=np.int64)])


def seen(
    num_tokens: int, parents: Sequence[int] | None, num_queries: int, window: int | None, chunk: int | None
) -> np.ndarray:
    """Return which tokens each of the last `num_queries` attends to, [num_queries, num_tokens] bool.

    Windows and chunks count positions, as in a chain: they reach over a node's own ancestors, not over its siblings.
    """
    sees = np.tri(num_queries, num_tokens, num_tokens - num_queries, dtype=bool)
    places = positions(num_tokens, parents)
    if parents is not None:
        start, num_nodes = num_tokens - len(parents), min(num_queries, len(parents))
        sees[num_queries - num_nodes :, start:] = _ancestry(parents)[len(parents) - num_nodes :]
    keys, queries = places[None, :], places[num_tokens - num_queries :, None]
    if window is not None:
        sees &= keys > queries - window
    if chunk is not None:
        sees &= keys // chunk == queries // chunk
    return sees


def _ancestry(parents: Sequence[int]) -> np.ndarray:
    """Return whether node i is node j or comes after it on a path, [n, n] bool."""
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees
