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
    """Chooses the nodes that a step feeds: the likeliest of all slots, shared fairly between callers.

    A node's gain is the probability that the target accepts it, so that draft tokens after it can be accepted, too.
    Feeding more nodes raises the sum of gains and takes longer; the scheduler chooses the number of nodes with the
    highest sum of gains per second.

        # gains 0.9, 0.5, 0.1; steps of 1, 2 and 3 rows take 10, 11 and 12 ms:
        # 0.9 / 10, 1.4 / 11 and 1.5 / 12 tokens per ms: two nodes are fed
    """

    def __init__(self, drafter: NodeDrafter[DraftSlot]) -> None:
        self._drafter = drafter
        self._max_candidates = 1
        if drafter.supports_trees:
            self._max_candidates = MAX_NODES_PER_SLOT
        self.cost = RowCost()
        self._budget = RowBudget[_Candidate](self.cost)

    def choose(self, slots: Iterable[DraftSlot], now: float) -> list[tuple[DraftSlot, Sequence[int]]]:
        """Return the nodes to feed next, by slot: the likeliest of all slots, as long as each caller gets its share of
        the worker.

        If a slot uses look-ahead rows, its `ahead` is told which of them to feed; they compete with the nodes by
        probability. `now`: monotonic time, in seconds.
        """
        candidates: dict[
            bytes, list[Iterable[_Candidate]]
        ] = {}  # by caller: for each node, the node and its look-ahead rows
        weights: dict[bytes, float] = {}
        for draft_slot in slots:
            if not draft_slot.is_growing:
                continue
            scheduling = draft_slot.slot.scheduling
            if now - draft_slot.slot.last_request_s < DORMANT_S:
                weights[scheduling.caller] = scheduling.weight
            if not self._drafter.is_ready(draft_slot):
                continue
            if not self._drafter.is_cached(draft_slot):
                draft_slot.tree.restart()
            own = [
                _Candidate(prob, node, draft_slot) for prob, node in draft_slot.tree.candidates(self._max_candidates)
            ]
            if own:
                candidates.setdefault(scheduling.caller, []).extend(_with_ahead(draft_slot, own))
                weights[scheduling.caller] = scheduling.weight
        chosen: dict[DraftSlot, list[int]] = {}
        for candidate in self._fair(candidates, weights):
            if candidate.node >= ROOT:
                chosen.setdefault(candidate.draft_slot, []).append(candidate.node)
            elif candidate.draft_slot.ahead is not None:
                candidate.draft_slot.ahead.mark(candidate.node)
        return list(chosen.items())

    def _fair(
        self, candidates: Mapping[bytes, Iterable[Iterable[_Candidate]]], weights: Mapping[bytes, float]
    ) -> list[_Candidate]:
        listed = dict[bytes, list[_Candidate]]()
        for caller, own in candidates.items():
            listed[caller] = list(islice(_merged(own), self.cost.reach))
        best = self._best(_merged(listed.values()))

        def units_of(caller: bytes) -> list[BudgetUnit[_Candidate]]:
            return [BudgetUnit(candidate, candidate.gain, 1) for candidate in self._best(listed.get(caller, ()))]

        def parts_of_best() -> Iterator[tuple[bytes, float, int]]:
            for candidate in best:
                yield candidate.draft_slot.slot.scheduling.caller, candidate.gain, 1

        return self._budget.deal(weights, parts_of_best(), units_of) or best

    def _best(self, candidates: Iterable[_Candidate]) -> list[_Candidate]:
        best = list(islice(candidates, self.cost.reach))
        if len(best) < 2:
            return best
        gains = np.array([candidate.gain for candidate in best]).cumsum()
        rates = gains / self.cost.seconds(np.arange(1, len(best) + 1))
        return best[: int(rates.argmax()) + 1]

    def note(self, num_rows: int, seconds: float) -> None:
        """Record the cost of the step that the last `choose` was for. `num_rows`: number of the step's rows. `seconds`:
        its duration.
        """
        self.cost.note(num_rows, seconds)
        self._budget.note(seconds)


class _Candidate(NamedTuple):
    gain: float
    """Probability that the target accepts the node; for a look-ahead row, that its token becomes a node and is
    accepted."""
    node: int
    """Index of the node in the slot's tree, or ROOT (-1); for a look-ahead row, its number, from -2 downwards."""
    draft_slot: DraftSlot


def _merged(candidates: Iterable[Iterable[_Candidate]]) -> Iterator[_Candidate]:
    return heapq.merge(*candidates, key=attrgetter("gain"), reverse=True)


def _with_ahead(draft_slot: DraftSlot, own: Sequence[_Candidate]) -> list[Iterable[_Candidate]]:
    if draft_slot.ahead is None:
        return [own]
    draft_slot.ahead.begin_step()
    return [_rows_ahead(draft_slot.ahead, candidate) for candidate in own]


def _rows_ahead(ahead: RowsAhead, candidate: _Candidate) -> Iterator[_Candidate]:
    yield candidate
    for prob, row in ahead.candidates(candidate.draft_slot.tree, candidate.node):
        yield candidate._replace(gain=prob, node=row)
