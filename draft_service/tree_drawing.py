"""One level of a tree, from the step's logits. On the host; called by the proposer."""

from __future__ import annotations

from draft_service.active import Active
from draft_service.drawing import as_sent
from draft_service.tree_growth import Growth, Guesses
from outrider.engine.coupled import coupled_ranked
from outrider.engine.host_sampling import HostLogits
from outrider.engine.noise import Purpose
from outrider.engine.penalties import LogitRow, SamplingState
from outrider.engine.row_law import RowLaw
from outrider.engine.side_by_side import side_by_side
from outrider.engine.slot_noise import host_slot_uniforms


def grow_level(a: Active, state: SamplingState, host: HostLogits, start: int) -> None:
    """The children of the frontier's nodes. host: the step's logits, of which the rows from `start` on are those after
    each of these nodes. Raises NonFiniteLogits.
    """
    growth, params = a.growth, a.slot.params
    assert growth is not None, "no tree grows here"
    position = len(a.slot.committed) + growth.num_levels
    rows = [LogitRow(state, growth.prefix(node)) for node in growth.frontier]
    num_ranked = growth.num_ranked()

    def guessed(index: int) -> Guesses:
        if params.greedy:
            return host.ranked(start + index, rows[index], num_ranked)
        return coupled_ranked(host.law(start + index, rows[index]), params, position, num_ranked)

    def law(index: int) -> RowLaw:
        return as_sent(a, host.law(start + index, rows[index]))

    num_logits = len(rows) * host.vocab_size
    if a.determined:
        growth.guess(side_by_side(guessed, range(len(rows)), num_logits))
    else:
        growth.draw(side_by_side(law, range(len(rows)), num_logits), _uniforms(a, growth, position))
    if growth.done:
        a.take_tree()


def _uniforms(a: Active, growth: Growth, position: int) -> list[float]:
    """For the level at `position`: of each of its draws one, by its place among them."""
    count, committed_len = growth.most_drawn(), len(a.slot.committed)
    each = [a.slot.params] * count, [committed_len] * count, [position] * count
    return host_slot_uniforms(*each, [Purpose.DRAFT], range(count))[0].tolist()
