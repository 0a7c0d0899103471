"""Choose which nodes of a draft worker's slots are fed in its next step. Runs on the engine thread."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from draft_service.slots.draft_slot import DraftSlot
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import NodeDrafter
from outrider.engine.speculation.growth import RowsAhead
from outrider.engine.speculation.row_budget import RowBudget, Unit
from outrider.engine.speculation.row_cost import RowCost
from outrider.engine.worker.scheduler import DORMANT_S

MAX_OFFERS = 16
"""Maximum number of nodes that one slot has in a step."""


class NodeScheduler:
    """Chooser of the likeliest nodes, as many as use a step's time best, shared between callers."""

    def __init__(self, drafter: NodeDrafter[DraftSlot]) -> None:
        self._drafter = drafter
        self._max_offers = MAX_OFFERS if drafter.takes_trees else 1
        self.cost = RowCost()
        self._budget = RowBudget[_Offer](self.cost)

    def choose(self, slots: Iterable[DraftSlot], now: float) -> list[tuple[DraftSlot, Sequence[int]]]:
        """Return the nodes of each slot to feed next: the likeliest, unless that would slow a caller beyond its share.

        Look-ahead rows after them are fed where they are as likely to be used.
        """
        offers: dict[bytes, list[Iterable[_Offer]]] = {}
        weights: dict[bytes, float] = {}
        for growing in slots:
            if not growing.is_growing:
                continue
            scheduling = growing.slot.scheduling
            if now - growing.slot.asked_s < DORMANT_S:
                weights[scheduling.caller] = scheduling.weight
            if not self._drafter.is_ready(growing):
                continue
            if not self._drafter.knows(growing):
                growing.tree.restart()
            own = [_Offer(prob, node, growing) for prob, node in growing.tree.offers(self._max_offers)]
            if own:
                offers.setdefault(scheduling.caller, []).extend(_with_ahead(growing, own))
                weights[scheduling.caller] = scheduling.weight
        chosen: dict[DraftSlot, list[int]] = {}
        for offer in self._fair(offers, weights):
            if offer.node >= ROOT:
                chosen.setdefault(offer.growing, []).append(offer.node)
            elif offer.growing.ahead is not None:
                offer.growing.ahead.ask(offer.node)
        return list(chosen.items())

    def _fair(self, offers: Mapping[bytes, Iterable[Iterable[_Offer]]], weights: Mapping[bytes, float]) -> list[_Offer]:
        listed = dict[bytes, list[_Offer]]()
        for caller, own in offers.items():
            listed[caller] = list(islice(_merged(own), self.cost.reach))
        best = self._best(_merged(listed.values()))
        step = ((offer.growing.slot.scheduling.caller, offer.gain, 1) for offer in best)
        dealt = self._budget.deal(
            weights, step, lambda caller: [Unit(offer, offer.gain, 1) for offer in self._best(listed.get(caller, ()))]
        )
        return dealt or best

    def _best(self, offers: Iterable[_Offer]) -> list[_Offer]:
        best = list(islice(offers, self.cost.reach))
        if len(best) < 2:
            return best
        gains = np.array(list(accumulate(offer.gain for offer in best)))
        rates = gains / self.cost.seconds(np.arange(1, len(best) + 1))
        return best[: int(rates.argmax()) + 1]

    def note(self, num_rows: int, seconds: float) -> None:
        """Record the duration of the step that was chosen last, in seconds."""
        self.cost.note(num_rows, seconds)
        self._budget.note(seconds)


class _Offer(NamedTuple):
    gain: float
    """Probability that the token is used."""
    node: int
    """Below ROOT for a look-ahead row."""
    growing: DraftSlot


def _merged(offers: Iterable[Iterable[_Offer]]) -> Iterator[_Offer]:
    return heapq.merge(*offers, key=attrgetter("gain"), reverse=True)


def _with_ahead(growing: DraftSlot, own: Sequence[_Offer]) -> list[Iterable[_Offer]]:
    if growing.ahead is None:
        return [own]
    growing.ahead.begin_step()
    return [_rows_ahead(growing.ahead, offer) for offer in own]


def _rows_ahead(ahead: RowsAhead, offer: _Offer) -> Iterator[_Offer]:
    yield offer
    for prob, row in ahead.offers(offer.growing.tree, offer.node):
        yield offer._replace(gain=prob, node=row)
