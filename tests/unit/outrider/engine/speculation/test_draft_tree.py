"""What stays of a draft's tree when tokens are committed."""

from typing import Any

import pytest

from outrider.engine.speculation.draft_tree import ROOT
from outrider.wire.requests.speculation import Speculation
from tests.unit.outrider.engine.speculation.growing import PROMPT, REJECTION, RULES, VOCAB_SIZE, Draft


@RULES
def test_what_hangs_below_the_committed_tokens_stays_with_its_place_in_the_cache(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(12)
    tree = draft.tree
    cells = [tree.prefix(node) for node in tree.fed]
    first = tree.children(ROOT)[0]
    path = tree.prefix(tree.children(first)[0])
    prefixes = [tree.prefix(node) for node in range(len(tree))]
    keep = draft.commit(list(path))
    assert [cells[place] for place in keep[:2]] == [path[:1], path]
    assert [cells[place] for place in keep[2:]] == [(*path, *tree.prefix(node)) for node in tree.fed]
    below = [prefix[2:] for prefix in prefixes if prefix[:2] == path and len(prefix) > 2]
    assert [tree.prefix(node) for node in range(len(tree))][: len(below)] == below
    assert tree.is_root_fed and tree.committed_len == len(draft.committed)
    assert tree.probs[tree.children(ROOT)[0]] == pytest.approx(draft.shares.prob(0), rel=0.2)  # as when it was made


@RULES
def test_tokens_that_were_not_drafted_begin_anew_after_those_that_were(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(12)
    first = draft.tree.children(ROOT)[0]
    place = draft.tree.fed.index(first)
    unknown = next(i for i in range(VOCAB_SIZE) if i not in draft.ids_after(first))
    assert draft.commit([draft.tree.ids[first], unknown, 7]) == [place]
    assert not draft.tree.fed and not draft.tree.unsent and draft.tree.candidates(4) == [(1.0, ROOT)]
    assert draft.tree.committed_len == len(draft.committed) and not draft.tree.is_root_fed


@RULES
def test_nodes_that_were_not_fed_become_roots_like_any_other(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(3, most=1)
    leaf = next(node for node in range(len(draft.tree)) if node not in draft.tree.fed)
    draft.commit(list(draft.tree.prefix(leaf)))
    assert draft.tree.candidates(4) == [(1.0, ROOT)]
    draft.grow(1)
    assert draft.tree.children(ROOT)


@RULES
def test_the_root_has_all_draft_tokens_after_a_token_that_nothing_predicted(rule: dict[str, Any]) -> None:
    """A node has few when it is far from the root: those that it lacks are made when it comes near, and are sent."""
    draft = Draft(**rule).grow()
    node = ROOT
    for _ in range(6):
        node = draft.tree.children(node)[0]
    num_before = len(draft.tree.children(node))
    assert node in draft.tree.fed
    draft.tree.unsent = []
    draft.commit(list(draft.tree.prefix(node)))
    fresh = Draft(draft.committed, **rule)
    fresh.shares.first = draft.shares.first
    fresh.grow(1)
    children = draft.tree.children(ROOT)
    assert num_before < len(children) == len(fresh.tree.children(ROOT))
    assert set(children[num_before:]) <= set(draft.tree.unsent)
    if rule != REJECTION:  # there what is drawn is of another segment
        assert draft.ids_after(ROOT) == fresh.ids_after(ROOT)


@RULES
def test_lost_memory_begins_anew_with_the_same_proposal(rule: dict[str, Any]) -> None:
    draft = Draft(speculation=Speculation(4, 16), **rule).grow()
    before = draft.ids_after(ROOT), draft.chain()
    draft.tree.restart()
    assert not draft.tree.fed and not draft.tree.unsent
    draft.grow()
    assert (draft.ids_after(ROOT), draft.chain()) == before


def test_an_answer_may_come_true_for_ever() -> None:
    draft = Draft(max_tokens=2000, scale=0.1)  # each guess has a probability of a few per cent
    for _ in range(1200):  # more than Python's calls may nest, and than a float's exponent holds
        draft.grow(2, most=1)
        draft.commit(draft.ids_after(ROOT)[-1:])
    assert draft.grow(3).tree.children(ROOT)


def test_a_key_begins_the_segment_of_the_state_that_it_leads_to() -> None:
    draft = Draft(**REJECTION).grow()
    key = draft.key_of(ROOT)
    assert draft.law_of(key) in draft.tree.segments
    assert {start for _, start in draft.chain()} == {len(PROMPT)}
    draft.commit([draft.tree.ids[key]])
    assert draft.chain() and {start for _, start in draft.chain()} == {len(PROMPT) + 1}


def test_a_chain_goes_on_where_the_target_drew_the_same_without_having_looked_at_it() -> None:
    draft = Draft(**REJECTION).grow()
    before = draft.chain()
    draft.commit([before[0][0]])
    assert draft.chain() == before[1:]
    draft.grow()
    assert draft.chain()[: len(before) - 1] == before[1:] and len(draft.chain()) >= len(before)
    assert {start for _, start in draft.chain()} == {len(PROMPT)}


def test_a_chain_that_is_over_where_the_target_stands_is_followed_by_the_next() -> None:
    draft = Draft(speculation=Speculation(3, 3), **REJECTION).grow()
    ids = [token_id for token_id, _ in draft.chain()]
    assert len(ids) == 3
    cells = [draft.tree.ids[node] for node in draft.tree.fed]
    keep = draft.commit(ids)  # by plain steps
    assert [cells[place] for place in keep] == ids[:-1]  # the last one's logits are wanted again
    draft.grow()
    assert [start for _, start in draft.chain()] == [len(PROMPT) + 3] * 3
