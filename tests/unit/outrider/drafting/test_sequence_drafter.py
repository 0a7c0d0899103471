"""Counts as drafters give them, and a sequence that grows and shrinks."""

import numpy as np

from outrider.drafting.sequence_drafter import TokenSequence, sorted_counts


def test_counts_are_in_the_order_of_their_ids() -> None:
    ids, counts = sorted_counts({9: 1, 2: 3, 5: 2})
    assert (ids.tolist(), counts.tolist()) == ([2, 5, 9], [3.0, 2.0, 1.0])
    assert ids.dtype == np.dtype(np.int64) and counts.dtype == np.dtype(np.float64)


def test_a_sequence_does_not_change_the_list_that_it_began_with() -> None:
    begun = [1, 2, 3]
    sequence = TokenSequence(begun)
    sequence.append([4])
    sequence.truncate(2)
    sequence.truncate(7)  # it is shorter
    assert (sequence.ids, sequence.num_tokens, begun) == ([1, 2], 2, [1, 2, 3])
