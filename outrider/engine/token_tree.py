"""Token trees on the host: each node's parent, its position, and which tokens it attends to.

A tree is given by its parents: for each node the index of its parent, -1 for the last token before the tree. A parent
comes before its children. Nodes lie in the cache in this order, after the tokens before the tree. A node attends to
those tokens, to its ancestors and to itself; its position is that of the last token of a chain of them (SpecInfer,
arXiv 2305.09781, section 4.2). Used by the model runner and by what builds rows, positions and masks.

    5 tokens, of which the last 3 are a tree: parents [-1, 0, 0]

    token     0  1  2  3  4      token 2 is the root, 3 and 4 are its children
    position  0  1  2  3  3
    token 3 attends to 0, 1, 2, 3; token 4 to 0, 1, 2, 4
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def check_parents(parents: Sequence[int]) -> None:
    """Assert that every parent is -1 or comes before its child."""
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, f"node {node} of a tree follows node {parent}"


def check_path(parents: Sequence[int], path: Sequence[int]) -> None:
    """Assert that `path` leads through the tree: its first node follows the token before the tree, and each further
    node is a child of the node before it.
    """
    previous = -1
    for node in path:
        assert 0 <= node < len(parents) and parents[node] == previous, f"{list(path)} is no path of {list(parents)}"
        previous = node


def num_ancestors(parents: Sequence[int]) -> list[int]:
    """Return the number of ancestors of each node within the tree: 0 for a child of the last token before the tree."""
    # parents [-1, 0, 0, 1]: [0, 1, 1, 2]
    found: list[int] = []
    for parent in parents:
        if parent < 0:
            found.append(0)
        else:
            found.append(found[parent] + 1)
    return found


def positions(num_tokens: int, parents: Sequence[int] | None) -> np.ndarray:
    """Return the positions [num_tokens] int64 of the tokens of a sequence that ends with a tree. parents: index of each
    node's parent in the tree, or -1; None = the sequence has no tree.
    """
    if parents is None:
        return np.arange(num_tokens)
    start = num_tokens - len(parents)
    return np.concatenate([np.arange(start), start + np.array(num_ancestors(parents), dtype=np.int64)])


def visible_tokens(
    num_tokens: int, parents: Sequence[int] | None, num_queries: int, window: int | None, chunk: int | None
) -> np.ndarray:
    """Return to which tokens each of the last `num_queries` tokens attends, [num_queries, num_tokens] bool.

    parents: index of each node's parent in the tree with which the sequence ends, or -1; None = it has no tree. window:
    number of positions that a token attends to, its own included. chunk: number of positions in a chunk; a token
    attends only to its own chunk. None = no limit. Siblings count as one position.
    """
    # 4 tokens, parents [-1, -1], 2 queries, window 3:  token 2 sees 0 1 2 -
    #                                                   token 3 sees 0 1 - 3
    sees = np.tri(num_queries, num_tokens, num_tokens - num_queries, dtype=bool)  # [q, L]
    all_positions = positions(num_tokens, parents)  # [L] int64
    if parents is not None:
        start = num_tokens - len(parents)
        num_nodes = min(num_queries, len(parents))  # nodes among the queries, the last ones
        sees[num_queries - num_nodes :, start:] = _ancestry(parents)[len(parents) - num_nodes :]
    keys = all_positions[None, :]  # [1, L]
    queries = all_positions[num_tokens - num_queries :, None]  # [q, 1]
    if window is not None:
        sees &= keys > queries - window
    if chunk is not None:
        sees &= keys // chunk == queries // chunk
    return sees


def _ancestry(parents: Sequence[int]) -> np.ndarray:
    """Return whether node j is node i or one of its ancestors, [n, n] bool.

    parents [-1, 0, 0]: [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees
