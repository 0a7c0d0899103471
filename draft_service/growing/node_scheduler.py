"""Choose which nodes of a draft worker's slots are fed in its next step. Runs on the engine thread."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from draft_service.slots.draft_slot import DraftSlot
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.growth import RowsAhead
from outrider.engine.speculation.node_drafter import NodeDrafter
from outrider.engine.speculation.row_budget import BudgetUnit, RowBudget
from outrider.engine.speculation.row_cost import RowCost
from outrider.engine.worker.scheduler import DORMANT_S

MAX_NODES_PER_SLOT = 16
"""Maximum number of nodes that one slot feeds in a step."""


class NodeScheduler:
    """Chooses the nodes that a step feeds: the likeliest of all slots, as many as use the step's time best, shared
    fairly between callers.

    A node's gain is the probability that its child is used. Feeding more nodes raises the sum of gains and takes
    longer; the scheduler chooses the number with the highest sum of gains per second.

        # gains 0.9, 0.5, 0.1; steps of 1, 2 and 3 rows take 10, 11 and 12 ms:
        # 0.9 / 10, 1.4 / 11 and 1.5 / 12 tokens per ms: two nodes are fed
    """

    def __init__(self, drafter: NodeDrafter[DraftSlot]) -> None:
        self._drafter = drafter
        self._max_offers = 1
        if drafter.takes_trees:
            self._max_offers = MAX_NODES_PER_SLOT
        self.cost = RowCost()
        self._budget = RowBudget[_Offer](self.cost)

    def choose(self, slots: Iterable[DraftSlot], now: float) -> list[tuple[DraftSlot, Sequence[int]]]:
        """Return the nodes to feed next, by slot: the likeliest, unless feeding them would slow a caller beyond its
        share.

        It also asks for look-ahead rows after these nodes if they are as likely to be used. `now`: monotonic time, in
        seconds.
        """
        offers: dict[bytes, list[Iterable[_Offer]]] = {}  # by caller: for each node, the node and its look-ahead rows
        weights: dict[bytes, float] = {}
        for draft_slot in slots:
            if not draft_slot.is_growing:
                continue
            scheduling = draft_slot.slot.scheduling
            if now - draft_slot.slot.asked_s < DORMANT_S:
                weights[scheduling.caller] = scheduling.weight
            if not self._drafter.is_ready(draft_slot):
                continue
            if not self._drafter.knows(draft_slot):
                draft_slot.tree.restart()
            own = [_Offer(prob, node, draft_slot) for prob, node in draft_slot.tree.offers(self._max_offers)]
            if own:
                offers.setdefault(scheduling.caller, []).extend(_with_ahead(draft_slot, own))
                weights[scheduling.caller] = scheduling.weight
        chosen: dict[DraftSlot, list[int]] = {}
        for offer in self._fair(offers, weights):
            if offer.node >= ROOT:
                chosen.setdefault(offer.draft_slot, []).append(offer.node)
            elif offer.draft_slot.ahead is not None:
                offer.draft_slot.ahead.ask(offer.node)
        return list(chosen.items())

    def _fair(self, offers: Mapping[bytes, Iterable[Iterable[_Offer]]], weights: Mapping[bytes, float]) -> list[_Offer]:
        listed = dict[bytes, list[_Offer]]()
        for caller, own in offers.items():
            listed[caller] = list(islice(_merged(own), self.cost.reach))
        best = self._best(_merged(listed.values()))

        def units_of(caller: bytes) -> list[BudgetUnit[_Offer]]:
            return [BudgetUnit(offer, offer.gain, 1) for offer in self._best(listed.get(caller, ()))]

        def parts_of_best() -> Iterator[tuple[bytes, float, int]]:
            for offer in best:
                yield offer.draft_slot.slot.scheduling.caller, offer.gain, 1

        return self._budget.deal(weights, parts_of_best(), units_of) or best

    def _best(self, offers: Iterable[_Offer]) -> list[_Offer]:
        best = list(islice(offers, self.cost.reach))
        if len(best) < 2:
            return best
        gains = np.array([offer.gain for offer in best]).cumsum()
        rates = gains / self.cost.seconds(np.arange(1, len(best) + 1))
        return best[: int(rates.argmax()) + 1]

    def note(self, num_rows: int, seconds: float) -> None:
        """Record the duration of the step that was chosen last, in seconds, and its number of rows."""
        self.cost.note(num_rows, seconds)
        self._budget.note(seconds)


class _Offer(NamedTuple):
    gain: float
    """Probability that the row's output is used."""
    node: int
    """Index of the node, or number of the look-ahead row, which is below ROOT."""
    draft_slot: DraftSlot


def _merged(offers: Iterable[Iterable[_Offer]]) -> Iterator[_Offer]:
    return heapq.merge(*offers, key=attrgetter("gain"), reverse=True)


def _with_ahead(draft_slot: DraftSlot, own: Sequence[_Offer]) -> list[Iterable[_Offer]]:
    if draft_slot.ahead is None:
        return [own]
    draft_slot.ahead.begin_step()
    return [_rows_ahead(draft_slot.ahead, offer) for offer in own]


def _rows_ahead(ahead: RowsAhead, offer: _Offer) -> Iterator[_Offer]:
    yield offer
    for prob, row in ahead.offers(offer.draft_slot.tree, offer.node):
        yield offer._replace(gain=prob, node=row)
