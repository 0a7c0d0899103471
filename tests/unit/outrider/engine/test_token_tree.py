"""What a tree's parents say: positions, and which tokens a query sees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.token_tree import check_parents, check_path, num_ancestors, positions, visible_tokens


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 12)))]


LIMITS = st.one_of(st.none(), st.integers(1, 9))


@given(trees(), st.integers(0, 20), st.integers(0, 20), LIMITS, LIMITS)
def test_a_node_sees_what_a_chain_of_its_ancestors_would(
    parents: list[int], start: int, num_again: int, window: int | None, chunk: int | None
) -> None:
    """Queries before the tree, which a wide batch feeds again, too."""
    num_tokens = start + len(parents)
    num_queries = len(parents) + min(num_again, start)
    sees, places = visible_tokens(num_tokens, parents, num_queries, window, chunk), positions(num_tokens, parents)
    assert places[:start].tolist() == list(range(start))
    for query in range(num_queries):
        token = num_tokens - num_queries + query
        chain = list(range(min(token + 1, start)))
        branch, node = [], token - start
        while node >= 0:
            branch.append(start + node)
            node = parents[node]
        chain += branch[::-1]
        assert places[token] == len(chain) - 1
        last = len(chain) - 1
        expected = [
            key
            for place, key in enumerate(chain)
            if (window is None or place > last - window) and (chunk is None or place // chunk == last // chunk)
        ]
        assert np.flatnonzero(sees[query]).tolist() == expected


@given(st.integers(1, 30), st.integers(1, 30), LIMITS)
def test_a_chain_is_a_tree_without_branches(num_tokens: int, num_queries: int, window: int | None) -> None:
    num_queries = min(num_queries, num_tokens)
    as_tree = visible_tokens(num_tokens, list(range(-1, num_queries - 1)), num_queries, window, None)
    assert np.array_equal(as_tree, visible_tokens(num_tokens, None, num_queries, window, None))
    assert positions(num_tokens, None).tolist() == list(range(num_tokens))


def test_depths_count_ancestors() -> None:
    assert num_ancestors([-1, 0, 0, 2, -1, 4, 3]) == [0, 1, 1, 2, 0, 1, 3]


def test_what_is_no_tree_or_no_path_of_it_is_named() -> None:
    check_parents([-1, -1, 0])
    check_path([-1, 0, 1], [])
    check_path([-1, 0, 0, 2], [0, 2, 3])
    with pytest.raises(AssertionError, match="node 1 of a tree follows node 1"):
        check_parents([-1, 1])
    with pytest.raises(AssertionError, match=r"\[0, 3\] is no path"):
        check_path([-1, 0, 0, 2], [0, 3])
