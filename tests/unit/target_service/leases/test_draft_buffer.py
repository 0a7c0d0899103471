"""What a target keeps of a draft's tree: by positions, whatever order, repetition or loss the deliveries suffer."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import MAX_BUFFERED_NODES, Delivery, InsertedNodes, NodeKind
from outrider.wire.requests.params import MAX_DRAFT_TOKENS
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.transport.codec import SparseDistributions
from target_service.leases.draft_buffer import DraftBuffer, buffer_bytes

PLENTY = 1 << 20
COMMITTED = [7, 8, 9]
LAWS = SparseDistributions((1, 1, 1, 1), b"\0" * 16, b"\0" * 16)


def chain(
    root_len: int,
    path: Sequence[int],
    ids: Sequence[int],
    kind: NodeKind = NodeKind.DETERMINISTIC,
    ends: Sequence[int] = (),
) -> Delivery:
    """Nodes one below the other, after those of a path that was delivered before."""
    num, num_known = len(path) + len(ids), len(path)
    rows = LAWS if kind is NodeKind.SAMPLED else None
    kinds = [*[NodeKind.REFERENCE] * num_known, *[kind] * len(ids)]
    parents = list(range(ROOT, num - 1))
    return Delivery(1, root_len, [*path, *ids], parents, [0] * num, kinds, rows, ends, num_bytes=10 * len(ids))


def chain_ids(buffer: DraftBuffer, max_len: int = 9) -> list[int]:
    return [buffer.tree.ids[node] for node in buffer.chain(max_len)]


class TestPlaces:
    def test_nodes_are_children_of_committed_tokens_and_of_a_path_of_draft_tokens(self) -> None:
        buffer = DraftBuffer()
        assert buffer.insert(chain(3, [], [1, 2]), COMMITTED, PLENTY) == InsertedNodes()
        assert buffer.insert(chain(3, [1, 2], [3]), COMMITTED, PLENTY) == InsertedNodes()
        assert chain_ids(buffer) == [1, 2, 3] and chain_ids(buffer, 2) == [1, 2]

    def test_a_delivery_for_an_earlier_length_counts_what_was_late_and_keeps_the_rest(self) -> None:
        buffer = DraftBuffer()
        inserted = buffer.insert(chain(1, [8], [9, 4]), COMMITTED, PLENTY)  # 9 is committed by now
        assert inserted == InsertedNodes(num_late=1)
        assert chain_ids(buffer) == [4]

    def test_what_disagrees_with_the_committed_tokens_or_has_no_parent_is_dropped(self) -> None:
        buffer = DraftBuffer()
        for nodes in (chain(1, [5], [9, 4]), chain(2, [], [5, 4]), chain(4, [], [1]), chain(3, [6], [1])):
            inserted = buffer.insert(nodes, COMMITTED, PLENTY)
            num_delivered = sum(kind is not NodeKind.REFERENCE for kind in nodes.kinds)
            assert inserted == InsertedNodes(num_dropped=num_delivered)
        assert len(buffer.tree) == 0

    def test_what_came_before_is_neither_new_nor_late_nor_dropped(self) -> None:
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [1, 2]), COMMITTED, PLENTY)
        assert buffer.insert(chain(3, [], [1, 2]), COMMITTED, PLENTY) == InsertedNodes()
        assert buffer.insert(chain(1, [8], []), COMMITTED, PLENTY) == InsertedNodes()
        assert len(buffer.tree) == 2

    def test_a_key_on_the_committed_path_was_no_draft_that_came_late(self) -> None:
        assert DraftBuffer().insert(chain(2, [], [9], NodeKind.RECOVERY), COMMITTED, PLENTY) == InsertedNodes()

    @given(seed=st.integers(0, 10_000))
    @settings(max_examples=60)
    def test_repeated_and_reordered_deliveries_make_the_same_tree(self, seed: int) -> None:
        generator = random.Random(seed)
        ids = [generator.randrange(5) for _ in range(6)]
        parts = [chain(3, ids[:place], ids[place : place + 2]) for place in range(5)]
        generator.shuffle(parts)
        buffer = DraftBuffer()
        for part in [*parts, *parts, *parts, *parts, *parts]:
            buffer.insert(part, COMMITTED, PLENTY)
        assert chain_ids(buffer) == ids and len(buffer.tree) == 6

    def test_bounds_in_nodes_and_bytes(self) -> None:
        buffer = DraftBuffer()
        for place in range(MAX_BUFFERED_NODES + 5):
            buffer.insert(chain(3, [], [place]), COMMITTED, PLENTY)
        assert len(buffer.tree) == MAX_BUFFERED_NODES

    def test_a_delivery_over_the_byte_limit_is_reported_and_not_waited_for(self) -> None:
        buffer = DraftBuffer()
        inserted = buffer.insert(chain(3, [], [1, 2, 3]), COMMITTED, 20)
        assert inserted == InsertedNodes(num_dropped=1, is_full=True)
        assert buffer.num_bytes == 20 and buffer.is_ended
        assert buffer.insert(chain(3, [1, 2], [3]), COMMITTED, PLENTY) == InsertedNodes()
        assert not buffer.is_ended

    @pytest.mark.parametrize("num_slots", [1, 64])
    def test_a_buffer_holds_the_longest_proposal(self, num_slots: int) -> None:
        distribution_bytes = 4 * 1000
        most_bytes = buffer_bytes(num_slots, 1000, PLENTY << 20) // num_slots
        buffer = DraftBuffer()
        for place in range(2 * MAX_DRAFT_TOKENS):
            nodes = replace(chain(3, [], [place], NodeKind.SAMPLED), num_bytes=60 + distribution_bytes)
            buffer.insert(nodes, COMMITTED, most_bytes)
        assert MAX_DRAFT_TOKENS <= len(buffer.tree) < 1.1 * MAX_DRAFT_TOKENS
        assert buffer.num_bytes <= most_bytes

    def test_log_probs_take_no_more_memory_than_allowed_and_deterministic_tokens_are_kept(self) -> None:
        assert buffer_bytes(64, 100_000, 1000) == buffer_bytes(64, 100_000, 0) + 1000
        buffer = DraftBuffer()
        for place in range(MAX_DRAFT_TOKENS):
            buffer.insert(replace(chain(3, [], [place]), num_bytes=200), COMMITTED, buffer_bytes(1, 100_000, 0))
        assert len(buffer.tree) == MAX_DRAFT_TOKENS


class TestAdvance:
    def test_what_hangs_under_the_tokens_committed_stays(self) -> None:
        buffer, seen = DraftBuffer(), list[int | None]()
        buffer.insert(chain(3, [], [1, 2, 3]), COMMITTED, PLENTY)
        buffer.insert(chain(3, [1], [5, 6]), COMMITTED, PLENTY)
        assert buffer.advance([1, 5], 3, seen.append) == (2, 0)
        assert chain_ids(buffer) == [6] and (len(buffer.tree), buffer.num_bytes, seen) == (1, 10, [0, 0])
        assert buffer.advance([9], 5, seen.append) == (1, 0)
        assert len(buffer.tree) == buffer.num_bytes == 0 and seen[-1] is None

    def test_what_came_while_the_step_ran_is_late_on_the_path_of_that_step_alone(self) -> None:
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [1]), COMMITTED, PLENTY)
        buffer.insert(chain(3, [1], [2, 3]), COMMITTED, PLENTY, in_step=True)
        assert buffer.advance([1, 2], 3, None) == (0, 1)
        assert buffer.advance([3], 5, None) == (0, 0)

    def test_a_chain_continues_after_a_bonus_token_and_below_a_recovery_node(self) -> None:
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [1, 2], NodeKind.SAMPLED), COMMITTED, PLENTY)
        buffer.advance([1], 3, None)
        assert chain_ids(buffer) == [2]
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [5], NodeKind.RECOVERY), COMMITTED, PLENTY)
        buffer.insert(chain(3, [5], [6], NodeKind.SAMPLED), COMMITTED, PLENTY)
        assert buffer.chain(9) == []  # a key is never verified
        buffer.advance([5], 4, None)
        assert chain_ids(buffer) == [6]


class TestEnds:
    """Whether more is waited for under the committed tokens."""

    @pytest.mark.parametrize(("end", "expected"), [(ROOT, True), (1, True), (0, False), (None, False)])
    def test_at_the_root_or_at_the_last_of_what_is_here(self, end: int | None, expected: bool) -> None:
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [1, 2], ends=() if end is None else (end,)), COMMITTED, PLENTY)
        assert buffer.is_ended is expected

    def test_an_end_may_concern_earlier_nodes_and_the_present_root(self) -> None:
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [1, 2]), COMMITTED, PLENTY)
        buffer.insert(chain(3, [1, 2], [], ends=(1,)), COMMITTED, PLENTY)
        assert buffer.is_ended
        late = DraftBuffer()
        late.insert(chain(2, [9], [], ends=(0,)), COMMITTED, PLENTY)
        assert late.is_ended
        lost = DraftBuffer()
        lost.insert(chain(1, [5], [], ends=(0,)), COMMITTED, PLENTY)
        assert not lost.is_ended

    def test_what_follows_after_all_is_waited_for_further(self) -> None:
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [1], ends=(0,)), COMMITTED, PLENTY)
        buffer.insert(chain(3, [1], [2]), COMMITTED, PLENTY)
        assert not buffer.is_ended

    def test_it_goes_with_the_tree(self) -> None:
        buffer = DraftBuffer()
        buffer.insert(chain(3, [], [1], ends=(ROOT,)), COMMITTED, PLENTY)
        buffer.advance([1], 3, None)
        assert not buffer.is_ended


def test_a_state_has_one_chain_the_first() -> None:
    """Under `rejection`, whatever is delivered: a longer one that comes later is not taken."""
    buffer = DraftBuffer()
    buffer.insert(chain(3, [], [1], NodeKind.SAMPLED), COMMITTED, PLENTY)
    other = SparseDistributions((1, 1), b"\0" * 8, b"\0" * 8)
    longer = Delivery(1, 3, [2, 3], [ROOT, 0], [0, 0], [NodeKind.SAMPLED] * 2, other)
    assert buffer.insert(longer, COMMITTED, PLENTY) == InsertedNodes(num_dropped=2)
    assert chain_ids(buffer) == [1]


def test_the_best_come_first_and_parents_before_their_children() -> None:
    buffer = DraftBuffer()
    for ids, parents, ranks in (([1, 2, 3], [ROOT, 0, 0], [0, 0, 1]), ([4, 5], [ROOT, 0], [1, 0])):
        kinds = [NodeKind.DETERMINISTIC] * len(ids)
        buffer.insert(Delivery(1, 3, ids, parents, ranks, kinds, None), COMMITTED, PLENTY)
    nodes, probs = buffer.likeliest(
        lambda rank: (0.6, 0.3)[rank], NodeKind.DETERMINISTIC, TreeShape(num_nodes=4, max_depth=4)
    )
    tree = buffer.tree.select(nodes)
    assert (tree.ids, tree.parents) == ([1, 2, 4, 3], [-1, 0, -1, 0])
    assert [round(prob, 3) for prob in probs] == [0.6, 0.36, 0.3, 0.18]
    wide, _ = buffer.likeliest(lambda rank: (0.6, 0.3)[rank], NodeKind.DETERMINISTIC, TreeShape(widths=(1, 2)))
    assert [buffer.tree.ids[node] for node in wide] == [1, 2, 3]
