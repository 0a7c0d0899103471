"""What is drawn for a node: by its law, with its own numbers."""

from typing import Any

import numpy as np
import pytest

from outrider.engine.sampling.coupled import coupled_ranked
from outrider.engine.sampling.penalties import LogitRow
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from tests.unit.outrider.engine.speculation.growing import PROMPT, REJECTION, RULES, VOCAB_SIZE, Draft


@RULES
def test_siblings_are_distinguished_by_rank_and_differ(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow()
    for node in draft.order:
        children = draft.tree.children(node)
        assert [draft.tree.ranks[child] for child in children] == list(range(len(children)))
        assert len(set(draft.ids_after(node))) == len(children)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 5 * VOCAB_SIZE])
@pytest.mark.parametrize("scale", [40.0, 4000.0])
def test_keys_are_other_ids_than_what_was_drawn_however_little_is_left(vocab_size: int, scale: float) -> None:
    """Next to a likely token all the others together may be less than a float32 holds, or nothing."""
    draft = Draft(**REJECTION, scale=scale, vocab_size=vocab_size).grow()
    for node in draft.order:
        drawn_id = draft.tree.ids[draft.law_of(node)]
        left = draft.law(LogitRow(draft.state, draft.tree.prefix(node))).without(drawn_id)
        keys = [draft.tree.ids[key] for key in draft.kinds_after(node, NodeKind.RECOVERY)]
        assert len(set(keys)) == len(keys) and all(left.prob(key) > 0 for key in keys)


def test_keys_come_in_the_order_of_the_targets_noise() -> None:
    """By the law without what is drawn there, as the target will draw if its law is like the draft's."""
    draft = Draft(**REJECTION).grow()
    num_reordered = 0
    for node in draft.order:
        drawn = draft.law_of(node)
        keys = [draft.tree.ids[key] for key in draft.kinds_after(node, NodeKind.RECOVERY)]
        left = draft.tree.distributions[drawn].without(draft.tree.ids[drawn])
        position = len(PROMPT) + draft.tree.depth(node)
        ranked, _ = coupled_ranked(left, draft.params, position, MAX_RANKS - 1)
        assert keys == ranked[: len(keys)]
        num_reordered += keys != [int(i) for i in np.argsort(-left.probs(), kind="stable")[: len(keys)]]
    assert num_reordered > 10


@pytest.mark.parametrize("shape", ["4x2x1", "2x2", "best:6x3"])
def test_a_named_tree_is_drawn_with_its_numbers_of_siblings(shape: str) -> None:
    tree = TreeShape.parse(shape)
    draft = Draft(speculation=Speculation(max_draft_tokens=tree.max_nodes, tree=tree), **REJECTION).grow()
    drawn = draft.drawn()
    assert sum(map(len, drawn.values())) == tree.max_nodes
    if tree.widths:
        assert all(len(ids) == tree.widths[len(path)] for path, ids in drawn.items())


def test_drafts_of_one_answer_draw_with_numbers_of_their_own() -> None:
    """Else two of one model would say the same, and the second's draw would be tested as though it might be another."""
    drafts = [Draft(speculation=Speculation(3, 16, draft_index=index), **REJECTION).grow(most=1) for index in range(4)]
    drawn = {tuple(draft.chain()) for draft in drafts}
    assert len(drawn) == len(drafts)
