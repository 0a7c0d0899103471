"""Chains that are ranked for who waits."""

from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.wire.requests.drafters import Drafter
from tests.unit.outrider.engine.sampling.counted import DRAFTERS, PARAMS, opened, state_of

K = 2


def test_a_slot_that_waits_is_drafted_for_once() -> None:
    """Other callers' steps go on meanwhile: what it costs to draft for those that wait would be taken from them."""
    drafter = DRAFTERS["ngram"]()
    own, slot = opened(drafter, PARAMS["penalties"])
    state, shares = state_of(PARAMS["penalties"]), SlotAcceptance(RankAcceptance())
    first = own.candidates(slot, Drafter.NGRAM, state, shares, K)
    assert own.candidates(slot, Drafter.NGRAM, state, shares, K) is first
    assert len(own.candidates(slot, Drafter.NGRAM, state, shares, 1).tree) == 1 < len(first.tree)
    slot.committed = [*slot.committed, first.tree.ids[0]]
    own.append(slot, slot.committed[-1:])
    after = own.candidates(slot, Drafter.NGRAM, state_of(PARAMS["penalties"]), shares, K)
    assert after.tree.ids != first.tree.ids
