"""What a target keeps of a draft's tree: by positions, whatever order, repetition or loss the deliveries suffer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.speculation.nodes import PATH_END, NodeKind, Nodes
from outrider.wire.transport.codec import SparseRows
from outrider.wire.tree_shape import TreeShape
from target_service.parked import MAX_PARKED_NODES, Parked, ParkedNode

PLENTY = 1 << 20
COMMITTED = [7, 8, 9]
LAWS = SparseRows((1, 1, 1, 1), b"\0" * 16, b"\0" * 16)


def chain(
    root_len: int, path: Sequence[int], ids: Sequence[int], kind: NodeKind = NodeKind.GUESS, segment: int = 0
) -> Nodes:
    """Nodes one below the other."""
    num = len(ids)
    rows = LAWS if kind is NodeKind.LAW else None
    parents = list(range(PATH_END, num - 1))
    return Nodes(1, root_len, path, ids, parents, [0] * num, [kind] * num, [segment] * num, rows, num_bytes=10 * num)


def ids_of(nodes: Sequence[ParkedNode]) -> list[int]:
    return [node.token_id for node in nodes]


class TestPlaces:
    def test_nodes_hang_under_what_is_committed_and_a_path_of_guesses(self) -> None:
        parked = Parked()
        assert parked.insert(chain(3, [], [1, 2]), COMMITTED, PLENTY).num_new == 2
        assert parked.insert(chain(3, [1, 2], [3]), COMMITTED, PLENTY).num_new == 1
        assert ids_of(parked.chain(9)) == [1, 2, 3] and ids_of(parked.chain(2)) == [1, 2]

    def test_a_delivery_for_an_earlier_length_counts_what_was_late_and_keeps_the_rest(self) -> None:
        parked = Parked()
        inserted = parked.insert(chain(1, [8], [9, 4]), COMMITTED, PLENTY)  # 9 is committed by now
        assert (inserted.num_late, inserted.num_new) == (1, 1)
        assert ids_of(parked.chain(9)) == [4]

    def test_what_disagrees_with_the_committed_tokens_or_has_no_parent_is_dropped(self) -> None:
        parked = Parked()
        for nodes in (chain(1, [5], [9, 4]), chain(2, [], [5, 4]), chain(4, [], [1]), chain(3, [6], [1])):
            inserted = parked.insert(nodes, COMMITTED, PLENTY)
            assert inserted.num_new == 0 and inserted.num_dropped == len(nodes.ids)
        assert parked.num_nodes == 0

    @given(seed=st.integers(0, 10_000))
    @settings(max_examples=60, deadline=None)
    def test_repeated_and_reordered_deliveries_make_the_same_tree_as_far_as_their_parents_are_there(
        self, seed: int
    ) -> None:
        generator = random.Random(seed)
        ids = [generator.randrange(5) for _ in range(6)]
        parts = [chain(3, ids[:place], ids[place : place + 2]) for place in range(5)]
        generator.shuffle(parts)
        parked = Parked()
        for part in [*parts, *parts, *parts, *parts, *parts]:
            parked.insert(part, COMMITTED, PLENTY)
        assert ids_of(parked.chain(9)) == ids and parked.num_nodes == 6

    def test_bounds_in_nodes_and_bytes(self) -> None:
        parked = Parked()
        assert parked.insert(chain(3, [], [1, 2, 3]), COMMITTED, 20).num_new == 2
        assert parked.num_bytes == 20
        parked = Parked()
        for place in range(MAX_PARKED_NODES + 5):
            parked.insert(chain(3, [], [place]), COMMITTED, PLENTY)
        assert parked.num_nodes == MAX_PARKED_NODES


class TestAdvance:
    def test_what_hangs_under_the_tokens_committed_stays(self) -> None:
        parked, seen = Parked(), list[int | None]()
        parked.insert(chain(3, [], [1, 2, 3]), COMMITTED, PLENTY)
        parked.insert(chain(3, [1], [5, 6]), COMMITTED, PLENTY)
        assert parked.advance([1, 5], recovered=False, note=seen.append) == 2
        assert ids_of(parked.chain(9)) == [6] and (parked.num_nodes, seen) == (1, [0, 0])
        assert parked.advance([9], recovered=False, note=seen.append) == 1
        assert parked.num_nodes == parked.num_bytes == 0 and seen[-1] is None

    def test_laws_below_a_recovered_token_are_of_no_use_nor_are_chains_that_began_before(self) -> None:
        parked = Parked()
        parked.insert(chain(3, [], [1, 2], NodeKind.LAW, segment=3), COMMITTED, PLENTY)
        parked.advance([1], recovered=True, note=None)
        parked.recovered_at(4)
        assert parked.num_nodes == 0
        committed = [*COMMITTED, 1]
        assert parked.insert(chain(3, [1], [2], NodeKind.LAW, segment=3), committed, PLENTY).num_new == 0
        assert parked.insert(chain(4, [], [2], NodeKind.LAW, segment=4), committed, PLENTY).num_new == 1

    def test_a_chain_goes_on_under_a_bonus_token_and_below_a_key(self) -> None:
        parked = Parked()
        parked.insert(chain(3, [], [1, 2], NodeKind.LAW, segment=3), COMMITTED, PLENTY)
        parked.advance([1], recovered=False, note=None)
        assert ids_of(parked.chain(9)) == [2]
        parked = Parked()
        parked.insert(chain(3, [], [5], NodeKind.KEY), COMMITTED, PLENTY)
        parked.insert(chain(3, [5], [6], NodeKind.LAW, segment=4), COMMITTED, PLENTY)
        assert parked.chain(9) == []  # a key is never verified
        parked.advance([5], recovered=True, note=None)
        assert ids_of(parked.chain(9)) == [6]


def test_a_state_has_one_chain_the_first() -> None:
    parked = Parked()
    parked.insert(chain(3, [], [1], NodeKind.LAW, segment=3), COMMITTED, PLENTY)
    other = Nodes(1, 3, [], [2], [PATH_END], [0], [NodeKind.LAW], [3], SparseRows((1,), b"\0" * 4, b"\0" * 4))
    assert parked.insert(other, COMMITTED, PLENTY).num_new == 0
    assert ids_of(parked.chain(9)) == [1]


def test_the_best_come_first_and_parents_before_their_children() -> None:
    parked = Parked()
    for ids, parents, ranks in (([1, 2, 3], [PATH_END, 0, 0], [0, 0, 1]), ([4, 5], [PATH_END, 0], [1, 0])):
        kinds = [NodeKind.GUESS] * len(ids)
        parked.insert(Nodes(1, 3, [], ids, parents, ranks, kinds, [0] * len(ids), None), COMMITTED, PLENTY)
    found = parked.best(lambda rank: (0.6, 0.3)[rank], 4)
    assert [(node.token_id, parent) for _, node, parent in found] == [(1, -1), (2, 0), (4, -1), (3, 0)]
    assert [round(chance, 3) for chance, *_ in found] == [0.6, 0.36, 0.3, 0.18]
    wide = parked.within(lambda rank: (0.6, 0.3)[rank], NodeKind.GUESS, TreeShape(widths=(1, 2)))
    assert [node.token_id for _, node, _ in wide] == [1, 2, 3]
