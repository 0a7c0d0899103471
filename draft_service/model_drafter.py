"""A draft that is a model: feeds the nodes that it is asked for, and pieces of prompts beside them, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from draft_service.draft_slot import DraftSlot
from draft_service.feeding import Feeder, cached
from draft_service.translated_slot import TranslatedSlot
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import NodeDistribution, NodeDrafter, of_logits
from outrider.engine.speculation.growth import Growth, RowAhead
from outrider.engine.speculation.nodes import TREE_ROOT
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill


class _SlotRows(NamedTuple):
    """A slot in a step."""

    growing: DraftSlot
    nodes: Sequence[int]
    ahead: Sequence[RowAhead]


class ModelDrafter(NodeDrafter[DraftSlot]):
    """A slot's cache holds its committed tokens and then the nodes of its tree that were fed, in that order."""

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot]) -> None:
        self.takes_trees = self.can_refeed = feeder.runner.supports_trees
        self._feeder = feeder
        self._runner = feeder.runner
        self._keeper = keeper

    def propose(
        self, requests: Sequence[tuple[DraftSlot, Sequence[int]]], now: float
    ) -> Sequence[NodeDistribution] | None:
        asked = dict[SlotKey, _SlotRows]()
        num_new, num_ahead = dict[SlotKey, int](), dict[SlotKey, int]()
        for growing, nodes in requests:
            key = growing.slot.key
            rows = [] if growing.ahead is None else growing.ahead.behind(nodes)
            asked[key] = _SlotRows(growing, nodes, rows)
            num_new[key] = 1 if _writes(growing) else len(nodes)
            if rows:
                num_ahead[key] = len(rows)
        fed = self._feeder.feed(num_new, lambda key: self._row(asked[key]), now, num_ahead)
        if fed is None:
            return None
        found, index = list[NodeDistribution](), 0
        host = HostLogits(fed.logits) if fed.rows else None
        for key, row in fed.rows:
            assert host is not None, "rows without logits"
            found += self._read(asked[key], row, host, index)
            index += row.num_logits
        return found

    def _row(self, asked: _SlotRows) -> Row:
        """Return a slot's part of the next forward: the committed tokens that are not cached, or nodes of its tree; and
        the rows ahead of them.
        """
        slot, tree = cached(asked.growing), asked.growing.tree
        num_cached, num_logits = len(slot.cached), len(asked.nodes) + len(asked.ahead)
        if isinstance(slot, TranslatedSlot) and slot.writes:
            return Row(slot.table, slot.next_written(), len(slot.cached), 1, slot.cached)
        if not tree.is_root_fed:
            new_ids, parents = slot.uncached(), None
            features = slot.features_of(len(new_ids))
        else:
            new_ids, parents = [tree.ids[node] for node in asked.nodes], _parents(tree, asked)
            features = self._features_of(tree, asked.nodes)
            if slot.translation is not None:
                new_ids = [slot.translation.draft_id(token_id) for token_id in new_ids]
        new_ids += [row.token_id for row in asked.ahead]
        return Row(slot.table, new_ids, num_cached, num_logits, slot.cached, parents, features, slot.source)

    def _read(self, asked: _SlotRows, row: Row, host: HostLogits, index: int) -> list[NodeDistribution]:
        """Return what follows the nodes of a slot whose row went through. index: of the row's first logits."""
        growing, nodes = asked.growing, asked.nodes
        slot, tree = cached(growing), growing.tree
        state = self._keeper.sampling_state(slot)
        if isinstance(slot, TranslatedSlot) and slot.writes:
            slot.note_written(row.new_ids, host.raw_best_id(index))
            return _read_text(slot, tree, nodes, state)
        self._note_fed(slot, tree, nodes, row, index)
        if slot.translation is not None:
            host = host.told(slot.translation.logits)
        found = list[NodeDistribution]()
        for place, node in enumerate(nodes, index):
            tree.feed(node)
            found.append(of_logits(tree, node, state, host, place))
        if growing.ahead is not None:
            fed = asked.ahead[: row.num_logits - len(nodes)]
            places = enumerate(fed, index + len(nodes))
            growing.ahead.note_fed([of_logits(tree, each.node, state, host, place) for place, each in places])
        return found

    def _features_of(self, tree: Growth, nodes: Sequence[int]) -> Tensor | None:
        """Return what goes into a forward beside nodes of a tree."""
        return None

    def _note_fed(self, slot: Slot, tree: Growth, nodes: Sequence[int], row: Row, index: int) -> None:
        """Note that a slot's row went through. index: that of the logits after the first of the nodes."""
        slot.fed(row.new_ids)

    def keep_fed(self, asked: DraftSlot, num_fed: int, keep: Sequence[int]) -> None:
        slot, tree = cached(asked), asked.tree
        if _writes(asked):  # it is all written anew, behind what of it was committed
            slot.settle()
            tree.restart()
            return
        start = len(slot.cached) - num_fed
        kept_ids = slot.cached[start:]
        if len(keep) < num_fed:
            kept_ids = [slot.cached[start + place] for place in keep]
            self._runner.rebase(slot.table, start, keep)
        slot.rebased(start, kept_ids)
        if isinstance(slot, TranslatedSlot):
            goes_on = tree.is_root_fed and slot.is_told(len(slot.cached) - len(tree.fed))
            if not goes_on:  # what was drawn token by token is told otherwise, and so is what follows it
                slot.settle()
                tree.restart()

    def knows(self, asked: DraftSlot) -> bool:
        """Memory may have been taken for others."""
        slot, tree = cached(asked), asked.tree
        num_cached = slot.first + len(slot.cached)
        return _writes(asked) or not tree.is_root_fed or num_cached == len(slot.ids) + len(tree.fed)

    def is_ready(self, asked: DraftSlot) -> bool:
        return not needs_prefill(cached(asked))

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


def _parents(tree: Growth, asked: _SlotRows) -> list[int] | None:
    """Return the parent of each node of a slot in the cache or the next row, by their order there; None for a chain."""
    index, parents = {ROOT: TREE_ROOT}, list[int]()
    for node in (*tree.fed, *asked.nodes):
        parents.append(index[tree.parents[node]])
        index[node] = len(index) - 1
    for row in asked.ahead:
        parents.append(index[row.parent])
        index[row.node] = len(index) - 1
    is_chain = parents == list(range(TREE_ROOT, len(parents) - 1))
    return None if is_chain else parents


def _writes(asked: DraftSlot) -> bool:
    slot = asked.slot
    return isinstance(slot, TranslatedSlot) and slot.writes


def _read_text(
    slot: TranslatedSlot, tree: Growth, nodes: Sequence[int], state: SamplingState
) -> list[NodeDistribution]:
    """Return what follows these nodes, as far as it is known, in the text that the draft has written. The others are
    asked for again.
    """
    found = list[NodeDistribution]()
    for node in nodes:
        ids = slot.guesses[tree.depth(node) :][:1]
        if ids or slot.has_ended:
            tree.feed(node)
            found.append(NodeDistribution(tree, node, state, _nothing, partial(_certain, ids)))
    return found


def _nothing(row: LogitRow) -> None:
    return None


def _certain(ids: Sequence[int], row: LogitRow, num: int) -> tuple[Sequence[int], Sequence[float]]:
    return ids, [1.0] * len(ids)
