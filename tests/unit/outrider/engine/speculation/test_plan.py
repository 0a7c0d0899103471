"""What is fed next of a draft's tree."""

from typing import Any

import pytest

from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.plan import MAX_DEPTH, MAX_FED
from outrider.engine.speculation.ranks import MIN_PROB
from outrider.wire.requests.speculation import Speculation
from tests.unit.outrider.engine.speculation.growing import REJECTION, RULES, Draft


@RULES
def test_the_likeliest_is_fed_first_and_whatever_is_fed_has_a_follower(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(most=1)
    tree = draft.tree
    probs = [tree.probs[node] for node in draft.order if node != ROOT]
    assert probs == sorted(probs, reverse=True)
    assert all(tree.children(node) for node in draft.order)
    assert 20 < len(tree.fed) <= MAX_FED
    assert max(map(tree.depth, range(len(tree)))) <= MAX_DEPTH
    assert all(tree.probs[node] >= MIN_PROB or tree.kinds[node] is NodeKind.SAMPLED for node in range(len(tree)))


def test_a_tree_of_large_distributions_is_bounded_by_their_bytes_except_for_a_fixed_number() -> None:
    assert len(Draft(max_fed=6, temperature=1.0).grow().tree.fed) == 6
    named = Draft(speculation=Speculation(num_draft_tokens=9, max_draft_tokens=16), max_fed=6, temperature=1.0).grow()
    assert not named.tree.is_awaited
    assert len(named.tree.fed) == 8  # the ninth has nothing named after it


@RULES
def test_alternating_workers_make_nothing_past_the_next_step(rule: dict[str, Any]) -> None:
    draft = Draft(speculation=Speculation(5, 5, is_sequential=True), **rule).grow()
    assert set(draft.tree.kinds.values()) == {NodeKind.SAMPLED if rule == REJECTION else NodeKind.DETERMINISTIC}
    assert len(draft.tree) == 5 and draft.tree.is_chain
    assert not draft.tree.candidates(4)


@RULES
def test_nothing_is_made_where_every_step_is_plain(rule: dict[str, Any]) -> None:
    assert not Draft(speculation=Speculation(), **rule).tree.candidates(4)


@RULES
@pytest.mark.parametrize("num", [1, 5, 20])
def test_a_named_number_is_made_however_unlikely_and_first(rule: dict[str, Any], num: int) -> None:
    draft = Draft(speculation=Speculation(num, 64), **rule).grow(most=1)
    trunk = [node for node in draft.order[:num] if node == ROOT or draft.tree.ranks[node] == 0]
    assert [draft.tree.depth(node) for node in trunk] == list(range(num))
