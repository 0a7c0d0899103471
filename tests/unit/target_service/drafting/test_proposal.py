"""The row of a slot in a step, and whose the logits after it are."""

from collections.abc import Sequence

import pytest
import torch

from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal, split_logits
from target_service.leases.lease import SlotDrafter
from tests.unit.outrider.engine.worker.opened import PROMPT, feed, make_table


def slot(slot_id: int = 1) -> Slot:
    """Four committed tokens, of which two are cached."""
    opened = make_table().open(1, slot_id, PROMPT, len(PROMPT), SamplingParams(max_tokens=20))
    feed(opened, PROMPT[:2])
    return opened


def rows(*parents: int) -> ExtraRows:
    return ExtraRows(Drafter.LOOKAHEAD, [30 + index for index in range(len(parents))], parents, width=1, depth=1)


@pytest.mark.parametrize(
    ("parents", "extra", "row_parents"),
    [
        ([], None, None),
        ([ROOT, 0], None, None),  # a chain
        ([ROOT, 0, 0], None, [-1, 0, 1, 2, 2]),
        ([ROOT, ROOT], None, [-1, 0, 1, 1]),
        ([ROOT], rows(ROOT, 1), [-1, 0, 1, 1, 3]),  # the second hangs under the first, which is token 3
    ],
)
def test_a_row_is_the_uncached_tokens_then_the_tree_then_the_extra_rows(
    parents: Sequence[int], extra: ExtraRows | None, row_parents: list[int] | None
) -> None:
    ids = [20 + node for node in range(len(parents))]
    row = Proposal(slot(), DraftTree.of(ids, parents), extra_rows=extra).row()
    extra_ids = [] if extra is None else list(extra.ids)
    assert row.new_ids == [*PROMPT[2:], *ids, *extra_ids]
    assert row.parents == row_parents
    assert row.num_logits == 1 + len(ids) + len(extra_ids), "after the last committed token, and after each other"
    assert row.num_cached == 2


def test_logits_after_extra_rows_decide_nothing() -> None:
    """Trees of 2 and 0 nodes, the first with 3 extra rows: rows 0, 1, 2 and 6 decide."""
    first = Proposal(slot(1), DraftTree.of([20, 21], [ROOT, 0]), extra_rows=rows(ROOT, 2, 3))
    second = Proposal(slot(2), DraftTree())
    logits = torch.arange(7.0)[:, None]  # [7, 1]
    own, extra_logits = split_logits([first, second], logits)
    assert own[:, 0].tolist() == [0, 1, 2, 6]
    assert {key: each[:, 0].tolist() for key, each in extra_logits.items()} == {(1, 1): [3, 4, 5]}
    own, extra_logits = split_logits([second], logits[:1])
    assert own.tolist() == [[0.0]] and not extra_logits


def test_a_node_is_the_first_drafters_that_proposes_it() -> None:
    one, other, idle = (SlotDrafter(Drafter.MODEL, SlotAcceptance(RankAcceptance())) for _ in range(3))
    tree = DraftTree.of([20, 21], [ROOT, ROOT])
    proposal = Proposal(slot(), tree, slot_drafters={idle: {}, one: {0: 0}, other: {0: 0, 1: 1}})
    assert [proposal.drafter_of_node(node) for node in (0, 1, 2)] == [one, other, None]
    assert proposal.drafted_by == [one, other]
