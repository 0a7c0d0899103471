"""The live beams as a tree: what is settled, what may leave the cache, and where nodes hang in a row."""

from outrider.engine.speculation.beam import BeamLevel
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.draft_tree import ROOT

PROMPT = (5, 6, 7)
TWO = BeamLevel(((0, 8, -1.0), (0, 9, -2.0)), ())
"""The prompt goes on with 8 and with 9."""


def test_what_all_beams_begin_with_is_settled() -> None:
    tree = BeamTree(PROMPT)
    assert tree.advance([TWO]) == ()
    assert (tree.ids, tree.active, tree.length, tree.active_depth) == ([8, 9], [0, 1], 4, 1)
    assert tree.advance([BeamLevel(((0, 3, -3.0), (0, 4, -4.0)), ())]) == (8,), "both go on with the first"
    assert ([tree.ids[node] for node in tree.active], tree.num_settled, tree.active_depth) == ([3, 4], 4, 1)
    assert tree.active_at == {4: [ROOT, None], 5: tree.active}, "no beam continues the second"


def test_one_beam_alone_is_all_settled() -> None:
    tree = BeamTree(PROMPT)
    assert tree.advance([BeamLevel(((0, 8, -1.0),), ()), BeamLevel(((0, 3, -2.0),), ())]) == (8, 3)
    assert (tree.active, tree.length, tree.active_depth, tree.ids) == ([ROOT], 5, 0, [])


def test_drafts_of_beams_that_go_on_stay_and_others_leave() -> None:
    tree = BeamTree(PROMPT)
    tree.advance([TWO])
    for parent, token_id in ((0, 3), (0, 4), (1, 3)):
        tree.find_or_add(parent, token_id)
    assert tree.find_or_add(0, 3) == 2, "it is there"
    assert tree.drafts() == [2, 3, 4]
    tree.advance([BeamLevel(((0, 4, -3.0), (1, 3, -3.5)), ())])
    assert [tree.prefix(node) for node in tree.active] == [(8, 4), (9, 3)]
    assert tree.drafts() == [] and sorted(tree.ids) == [3, 4, 8, 9]
    assert sorted(tree.ids[node] for node in tree.inner()) == [8, 9]


def test_parents_are_indices_in_the_row_after_the_root_and_the_fed_nodes() -> None:
    """The root is token 1 of the row; 8 is fed and becomes token 2, and 9 and 3 are new."""
    tree = BeamTree(PROMPT)
    tree.advance([TWO])
    below = tree.find_or_add(0, 3)
    tree.fed.append(0)
    assert tree.unfed([ROOT, 0, 1, below]) == [1, below]
    assert tree.parents_of([1, below], root_at=1) == [1, 1, 2]
