"""The drafter with a model or an EAGLE head: one forward feeds the requested nodes, and chunks of prompts beside them.

A head is a model that reads, beside each id, the feature of the token before it. For draft tokens it reads its own
output in place of that feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from draft_service.drafters.feeding import Feeder, FeedRequest, cached
from draft_service.slots.draft_slot import DraftSlot, NodeRequest
from draft_service.slots.head_slot import is_fed
from draft_service.slots.translated_slot import TranslatedSlot
from outrider.engine.heads.loader import AnyHeadPath
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import NodeDistribution, NodeDrafter, of_logits
from outrider.engine.speculation.growth import Growth
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot


class ModelDrafter(NodeDrafter[DraftSlot]):
    """Drafter with a model or a head that has a cache.

    A slot's cache holds its committed tokens, then the fed nodes of its tree in the order in which they were fed. The
    tree keeps a head's output after each of these, its carry [width], which is the feature of the next token.
    """

    def __init__(self, feeder: Feeder, head_path: AnyHeadPath | None = None) -> None:
        """Create a drafter. `head_path`: path of the feeder's runner, where it runs a head."""
        self.takes_trees = feeder.runner.supports_trees
        self.can_refeed = self.takes_trees and head_path is None  # a head needs the output at the parent node
        self._feeder = feeder
        self._head_path = head_path

    def propose(self, requests: Sequence[NodeRequest], now: float) -> Sequence[NodeDistribution] | None:
        asked = dict[SlotKey, FeedRequest]()
        for growing, nodes in requests:
            ahead = () if growing.ahead is None else growing.ahead.behind(nodes)
            asked[growing.slot.key] = FeedRequest(growing, len(nodes), nodes, ahead)
        fed = self._feeder.feed(asked, self._row, now)
        if fed is None:
            return None
        rows, logits = fed
        found = list[NodeDistribution]()
        host = HostLogits(logits)
        index = 0
        for request, row in rows:
            found += self._read(request, row, host, index)
            index += row.num_logits
        return found

    def _row(self, request: FeedRequest) -> Row:
        slot = cached(request.growing)
        tree = request.growing.tree
        nodes = request.nodes
        num_cached = len(slot.cached)
        num_logits = len(nodes) + len(request.ahead)
        if _writes(slot):
            return Row(slot.table, slot.next_written(), num_cached, 1, slot.cached)
        if not tree.is_root_fed:
            new_ids, parents = slot.uncached(), None
            features = slot.features_of(len(new_ids))
        else:
            new_ids, parents = [tree.ids[node] for node in nodes], _parents(tree, request)
            features = None
            if self._head_path is not None:
                features = torch.stack([tree.carries[tree.parents[node]] for node in nodes])
            if slot.translation is not None:
                new_ids = [slot.translation.draft_id(token_id) for token_id in new_ids]
        new_ids += [row.token_id for row in request.ahead]
        return Row(slot.table, new_ids, num_cached, num_logits, slot.cached, parents, features, slot.source)

    def _read(self, request: FeedRequest, row: Row, host: HostLogits, index: int) -> list[NodeDistribution]:
        growing, nodes = request.growing, request.nodes
        slot, tree = cached(growing), growing.tree
        state = self._feeder.keeper.sampling_state(slot)
        if _writes(slot):
            slot.note_written(row.new_ids, host.raw_best_id(index))
            return _read_text(slot, tree, nodes, state)
        num_committed = 0
        if not tree.is_root_fed:
            num_committed = row.num_new - len(request.ahead)
        slot.fed_committed(row.new_ids[:num_committed])
        slot.fed(row.new_ids[num_committed:])
        if slot.translation is not None:
            host = host.told(slot.translation.logits)
        found = list[NodeDistribution]()
        for place, node in enumerate((*nodes, *(each.node for each in request.ahead)), index):
            found.append(of_logits(tree, node, state, host, place))
            if self._head_path is not None:
                tree.carries[node] = self._head_path.hidden[place]
        if growing.ahead is not None:
            growing.ahead.note_fed(found[len(nodes) :])
        return found[: len(nodes)]

    def keep_fed(self, asked: DraftSlot, num_fed: int, keep: Sequence[int]) -> None:
        slot, tree = cached(asked), asked.tree
        goes_on = not _writes(slot)  # a text is written anew after its committed part
        if goes_on:
            start = len(slot.cached) - num_fed
            kept_ids = [slot.cached[start + place] for place in keep]
            if len(keep) < num_fed:
                self._feeder.runner.rebase(slot.table, start, keep)
            slot.rebased(start, kept_ids)
            if isinstance(slot, TranslatedSlot):  # what was sampled token by token may be retokenized otherwise
                goes_on = tree.is_root_fed and slot.is_told(len(slot.cached) - len(tree.fed))
        if not goes_on:
            tree.restart()
        if not tree.is_root_fed:
            slot.settle()  # entries that a head computed from its own outputs are computed again from features

    def knows(self, asked: DraftSlot) -> bool:
        """Return whether all fed tokens are still in the cache: another slot may have taken the memory."""
        slot, tree = cached(asked), asked.tree
        num_cached = slot.first + len(slot.cached)
        return _writes(slot) or not tree.is_root_fed or num_cached == len(slot.ids) + len(tree.fed)

    def is_ready(self, asked: DraftSlot) -> bool:
        return is_fed(cached(asked)) or (asked.tree.is_root_fed and self.knows(asked))

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


def _parents(tree: Growth, request: FeedRequest) -> list[int] | None:
    """Return the parent index of each node in the cache or the next row, in their order there; None for a chain."""
    index, parents = {ROOT: ROOT}, list[int]()
    for node in (*tree.fed, *request.nodes):
        parents.append(index[tree.parents[node]])
        index[node] = len(index) - 1
    for row in request.ahead:
        parents.append(index[row.parent])
        index[row.node] = len(index) - 1
    is_chain = parents == list(range(ROOT, len(parents) - 1))
    return None if is_chain else parents


def _writes(slot: Slot) -> TypeGuard[TranslatedSlot]:
    return isinstance(slot, TranslatedSlot) and slot.writes


def _read_text(
    slot: TranslatedSlot, tree: Growth, nodes: Sequence[int], state: SamplingState
) -> list[NodeDistribution]:
    """Return the distributions after nodes that the draft's text reaches so far. The other nodes stay on offer."""
    found = list[NodeDistribution]()
    for node in nodes:
        ids = slot.guesses[tree.depth(node) :][:1]
        if ids or slot.has_ended:
            found.append(_certain(tree, node, state, ids))
    return found


def _certain(tree: Growth, node: int, state: SamplingState, ids: Sequence[int]) -> NodeDistribution:
    return NodeDistribution(tree, node, state, lambda row: None, lambda row, num: (ids, [1.0] * len(ids)))
