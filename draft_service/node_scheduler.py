"""Which nodes of a draft worker's slots are fed in its next step. On the engine thread."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

from draft_service.draft_slot import DraftSlot
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import NodeDrafter
from outrider.engine.speculation.growth import RowsAhead
from outrider.engine.speculation.row_budget import CallerPart, RowBudget, Unit
from outrider.engine.speculation.row_cost import RowCost, best_count
from outrider.engine.worker.scheduler import DORMANT_S

MAX_OFFERS = 16
"""Nodes that one slot has in a step at most."""


class NodeScheduler:
    """Chooses as many of the likeliest nodes as make the most of a step's time, and shares it between callers."""

    def __init__(self, drafter: NodeDrafter[DraftSlot]) -> None:
        self._drafter = drafter
        self._max_offers = MAX_OFFERS if drafter.takes_trees else 1
        self.cost = RowCost()
        self._budget = RowBudget[_Offer](self.cost)

    def choose(self, slots: Iterable[DraftSlot], now: float) -> list[tuple[DraftSlot, Sequence[int]]]:
        """Return what is asked for next: nodes of several slots, the likeliest first unless that slows a caller by more
        than its part. Rows ahead of them are asked for where they are as likely to be of use.
        """
        offers: dict[bytes, list[Iterable[_Offer]]] = {}
        weights: dict[bytes, float] = {}
        for index, growing in enumerate(slots):
            if not growing.is_growing:
                continue
            scheduling = growing.slot.scheduling
            if now - growing.slot.asked_s < DORMANT_S:
                weights[scheduling.caller] = scheduling.weight
            if not self._drafter.is_ready(growing):
                continue
            if not self._drafter.knows(growing):
                growing.tree.restart()
            own = [_Offer(-prob, index, node, growing) for prob, node in growing.tree.offers(self._max_offers)]
            if own:
                offers.setdefault(scheduling.caller, []).extend(_with_ahead(growing, own))
                weights[scheduling.caller] = scheduling.weight
        chosen: dict[int, tuple[DraftSlot, list[int]]] = {}
        for offer in self._fair(offers, weights):
            if offer.node >= ROOT:
                chosen.setdefault(offer.slot_index, (offer.growing, []))[1].append(offer.node)
            elif offer.growing.ahead is not None:
                offer.growing.ahead.ask(offer.node)
        return list(chosen.values())

    def _fair(self, offers: Mapping[bytes, Iterable[Iterable[_Offer]]], weights: Mapping[bytes, float]) -> list[_Offer]:
        """Return the offers that make the most of the draft's time, of several callers each with its part. weights: of
        all that are drafted for.
        """
        if len(weights) < 2:
            self._budget.deal(())
            return self._best(chain.from_iterable(offers.values()))
        listed = {caller: [list(each) for each in own] for caller, own in offers.items()}
        best = self._best(chain.from_iterable(listed.values()))
        gains, num_rows = dict.fromkeys(listed, 0.0), dict.fromkeys(listed, 0)
        for offer in best:
            caller = offer.growing.slot.scheduling.caller
            gains[caller] -= offer.cost
            num_rows[caller] += 1
        parts = list[CallerPart[_Offer]]()
        for caller, weight in weights.items():
            part = CallerPart[_Offer](caller, weight)
            if caller in listed:
                alone = self._best(listed[caller])
                gain, units = -sum(offer.cost for offer in alone), [Unit(offer, 1) for offer in alone]
                part = CallerPart(caller, weight, gains[caller], num_rows[caller], gain, units)
            parts.append(part)
        return self._budget.deal(parts) or best

    def _best(self, offers: Iterable[Iterable[_Offer]]) -> list[_Offer]:
        """Return those that make the most of the draft's time, the likeliest first; one at least, if there are any."""
        best = list(islice(heapq.merge(*offers, key=itemgetter(0, 1)), self.cost.reach))
        return best[: max(1, best_count([-offer.cost for offer in best], 0.0, 0, self.cost))]

    def note(self, num_rows: int, seconds: float) -> None:
        """Record how long the step took that was chosen last."""
        self.cost.note(num_rows, seconds)
        self._budget.note(seconds)


class _Offer(NamedTuple):
    """A node that may be fed, or a row ahead."""

    cost: float
    """Its negated probability of use."""
    slot_index: int
    """Of its slot among those that grow."""
    node: int
    """Below ROOT for a row ahead."""
    growing: DraftSlot


def _with_ahead(growing: DraftSlot, own: Sequence[_Offer]) -> list[Iterable[_Offer]]:
    """Return the nodes that a slot offers, best first, with the rows ahead of them."""
    if growing.ahead is None:
        return [own]
    growing.ahead.begin_step()
    return [_rows_ahead(growing.ahead, offer) for offer in own]


def _rows_ahead(ahead: RowsAhead, offer: _Offer) -> Iterator[_Offer]:
    yield offer
    for prob, row in ahead.offers(offer.growing.tree, offer.node):
        yield offer._replace(cost=-prob, node=row)
