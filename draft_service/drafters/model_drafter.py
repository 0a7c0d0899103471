"""The drafter with a model or an EAGLE head: one forward feeds the requested nodes, and chunks of prompts.

Beside each token id, a head takes as input the feature of the token before it. The target has made no features of draft
tokens yet; for them the head uses its own output in place of the feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import torch

from draft_service.drafters.feeding import Feeder, FeedRequest, cache_slot_of
from draft_service.slots.draft_slot import DraftSlot, NodeRequest
from draft_service.slots.head_slot import is_fed
from draft_service.slots.translated_slot import TranslatedSlot
from outrider.engine.heads.head_loader import AnyHeadPath
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.growth import Growth
from outrider.engine.speculation.node_drafter import NodeDistribution, NodeDrafter, distribution_of_logits
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot


class ModelDrafter(NodeDrafter[DraftSlot]):
    """Drafter with a model, or with a head that has a cache.

    A slot's cache holds its committed tokens, then the fed nodes of its tree in the order in which they were fed. With
    a head, the tree also keeps the head's output [d] after ROOT and after each fed node. When a child of such a node is
    fed, the head reads the node's output in place of a feature, which the target has not computed yet.

        # 5 committed tokens, then nodes 2 and 0 were fed: cache positions 5 and 6 hold nodes 2 and 0
    """

    def __init__(self, feeder: Feeder, head_path: AnyHeadPath | None = None) -> None:
        """Create a drafter. `head_path`: path of the feeder's runner if it runs a head; None for a model."""
        self.supports_trees = feeder.runner.supports_trees
        self.can_refeed = self.supports_trees and head_path is None  # a head needs the output at the parent node
        self._feeder = feeder
        self._head_path = head_path

    def propose(self, requests: Sequence[NodeRequest], now: float) -> Sequence[NodeDistribution] | None:
        feed_requests = dict[SlotKey, FeedRequest]()
        for draft_slot, nodes in requests:
            request = FeedRequest(draft_slot, len(nodes), nodes)
            if draft_slot.ahead is not None:
                request = replace(request, ahead=draft_slot.ahead.behind(nodes))
            feed_requests[draft_slot.slot.key] = request
        fed = self._feeder.feed(feed_requests, self._row, now)
        if fed is None:
            return None
        rows, logits = fed
        distributions = list[NodeDistribution]()
        host = HostLogits(logits)
        index = 0
        for request, row in rows:
            distributions += self._read(request, row, host, index)
            index += row.num_logits
        return distributions

    def _row(self, request: FeedRequest) -> Row:
        slot = cache_slot_of(request.draft_slot)
        tree = request.draft_slot.tree
        nodes = request.nodes
        num_cached = len(slot.cached)
        num_logits = len(nodes) + len(request.ahead)
        if _writes(slot):
            return Row(slot.table, slot.next_written(), num_cached, 1, slot.cached)
        parents = None
        if not tree.is_root_fed:
            new_ids = slot.uncached()
            features = slot.features_of(len(new_ids))
        else:
            new_ids = [tree.ids[node] for node in nodes]
            parents = _parents(tree, request)
            features = None
            if self._head_path is not None:
                features = torch.stack([tree.carries[tree.parents[node]] for node in nodes])
            if slot.translation is not None:
                new_ids = list(map(slot.translation.draft_id, new_ids))
        for row in request.ahead:
            new_ids.append(row.token_id)
        return Row(slot.table, new_ids, num_cached, num_logits, slot.cached, parents, features, slot.source)

    def _read(self, request: FeedRequest, row: Row, host: HostLogits, index: int) -> list[NodeDistribution]:
        draft_slot = request.draft_slot
        nodes = request.nodes
        slot = cache_slot_of(draft_slot)
        tree = draft_slot.tree
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
            host = host.convert(slot.translation.logits)
        fed_nodes = [*nodes, *(row_ahead.node for row_ahead in request.ahead)]
        distributions = list[NodeDistribution]()
        for row_index, node in enumerate(fed_nodes, index):
            distributions.append(distribution_of_logits(tree, node, state, host, row_index))
            if self._head_path is not None:
                tree.carries[node] = self._head_path.hidden[row_index]
        if draft_slot.ahead is not None:
            draft_slot.ahead.note_fed(distributions[len(nodes) :])
        return distributions[: len(nodes)]

    def keep_fed(self, draft_slot: DraftSlot, num_fed: int, keep: Sequence[int]) -> None:
        slot = cache_slot_of(draft_slot)
        tree = draft_slot.tree
        is_kept = not _writes(slot)  # a text is written anew after its committed part
        if is_kept:
            start = len(slot.cached) - num_fed
            kept_ids = [slot.cached[start + offset] for offset in keep]
            if len(keep) < num_fed:
                self._feeder.runner.rebase(slot.table, start, keep)
            slot.rebased(start, kept_ids)
            if isinstance(slot, TranslatedSlot):  # what was sampled token by token may be retokenized otherwise
                is_kept = tree.is_root_fed and slot.is_cache_committed(len(slot.cached) - len(tree.fed))
        if not is_kept:
            tree.restart()
        if not tree.is_root_fed:
            slot.settle()  # entries that a head computed from its own outputs are computed again from features

    def is_cached(self, draft_slot: DraftSlot) -> bool:
        """Return whether the cache still holds all tokens of the slot that were fed. Some are missing if their memory
        was given to another slot.
        """
        slot = cache_slot_of(draft_slot)
        tree = draft_slot.tree
        num_cached = slot.first + len(slot.cached)
        return _writes(slot) or not tree.is_root_fed or num_cached == len(slot.ids) + len(tree.fed)

    def is_ready(self, draft_slot: DraftSlot) -> bool:
        return is_fed(cache_slot_of(draft_slot)) or (draft_slot.tree.is_root_fed and self.is_cached(draft_slot))

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


def _parents(tree: Growth, request: FeedRequest) -> list[int] | None:
    """Return the parent of each node in the cache or the next row, as an index in their order there; None for a chain.

    # fed nodes [0], then 1 and 2 under it: parents [ROOT, 0, 0]
    # fed nodes [0], then 1 under 0: parents [ROOT, 0] is a chain
    """
    index = {ROOT: ROOT}
    parents = list[int]()
    for node in (*tree.fed, *request.nodes):
        parents.append(index[tree.parents[node]])
        index[node] = len(index) - 1
    for row in request.ahead:
        parents.append(index[row.parent])
        index[row.node] = len(index) - 1
    is_chain = parents == list(range(ROOT, len(parents) - 1))
    return None if is_chain else parents


def _writes(slot: Slot) -> TypeGuard[TranslatedSlot]:
    return isinstance(slot, TranslatedSlot) and slot.drafts_text


def _read_text(
    slot: TranslatedSlot, tree: Growth, nodes: Sequence[int], state: SamplingState
) -> list[NodeDistribution]:
    # Nodes that the draft's text does not reach so far are offered again in the next step.
    distributions = list[NodeDistribution]()
    for node in nodes:
        ids = slot.draft_ids[tree.depth(node) :][:1]
        if ids or slot.has_ended:
            distributions.append(_certain(tree, node, state, ids))
    return distributions


def _certain(tree: Growth, node: int, state: SamplingState, ids: Sequence[int]) -> NodeDistribution:
    return NodeDistribution(tree, node, state, lambda row: None, lambda row, num: (ids, [1.0] * len(ids)))
