"""Drafters that propose tokens for several positions in one forward: heads that draft from the target's newest feature,
and models and heads that fill masks.

The logits of a position do not depend on the draft tokens before it, unless a sequential head biases them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_service.drafters.feeding import Feeder, FeedRequest, cache_slot_of
from draft_service.slots.draft_slot import Block, DraftSlot, NodeRequest
from draft_service.slots.head_slot import HeadSlot, is_fed
from outrider.engine.heads.dflash import DFlashHead
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.heads.network import BlockShape
from outrider.engine.host_copy import to_device
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.node_drafter import NodeDistribution, NodeDrafter, distribution_of_logits
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slot_keeper import SlotKeeper


class BlockDrafter(NodeDrafter[DraftSlot]):
    """Drafter that predicts a block of several positions for each slot in one forward. The distribution after a draft
    token is read from the block of its slot, at the token's depth.
    """

    is_block_drafter = True

    def __init__(self, keeper: SlotKeeper[Any], num_positions: int) -> None:
        """Create a drafter. `keeper`: holds the worker's slots. `num_positions`: number of positions in a block."""
        self.max_depth = num_positions
        self._keeper = keeper

    def propose(self, requests: Sequence[NodeRequest], now: float) -> Sequence[NodeDistribution] | None:
        without_block = list[DraftSlot]()
        for draft_slot, _ in requests:
            if draft_slot.block is None:
                without_block.append(draft_slot)
        has_worked = self._make_blocks(without_block, now)
        ready = list[NodeRequest]()
        for request in requests:
            if request[0].block is not None:  # there was memory for its block
                ready.append(request)
        rows = self._rows(ready)
        outputs = list[NodeDistribution]()
        for draft_slot, nodes in ready:
            state = self._keeper.sampling_state(draft_slot.slot)
            for node in nodes:
                host, index = next(rows)
                outputs.append(distribution_of_logits(draft_slot.tree, node, state, host, index))
        return outputs if outputs or has_worked else None

    def _rows(self, requests: Sequence[NodeRequest]) -> Iterator[tuple[HostLogits, int]]:
        # A node's row of its slot's block is its depth: ROOT, the last committed token, has row 0.
        for draft_slot, nodes in requests:
            host = HostLogits(block_of(draft_slot).logits)
            for node in nodes:
                yield host, draft_slot.tree.depth(node)

    @abstractmethod
    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        """Fill blocks for these slots after their last committed tokens, as far as there is memory, and prefill
        prompts.

        Return whether there was anything to do.
        """

    def keep_fed(self, draft_slot: DraftSlot, num_fed: int, keep: Sequence[int]) -> None:
        draft_slot.slot.settle()

    def is_ready(self, draft_slot: DraftSlot) -> bool:
        return draft_slot.block is not None or is_fed(cache_slot_of(draft_slot))


def block_of(draft_slot: DraftSlot) -> Block:
    """Return the block that a block drafter has predicted for a slot. The slot must have one."""
    assert draft_slot.block is not None, "it has none"
    return draft_slot.block


def set_blocks(slots: Sequence[DraftSlot], counts: Sequence[int], *outputs: Tensor) -> None:
    """Set the block of each slot from rows of a forward's outputs.

    `slots`: slots whose rows follow one another in the outputs. `counts`: number of rows of each slot. `outputs`:
    tensors [sum(counts), ...], one for each field of `Block`, in order.

        # counts [3, 2]: the first slot has rows 0 to 2 of each output, the second slot rows 3 and 4
    """
    parts = [split_rows(rows, counts) for rows in outputs]
    for draft_slot, *block in zip(slots, *parts, strict=True):
        draft_slot.block = Block(*block)


def split_rows(rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Split the rows of a tensor into consecutive parts: part i has counts[i] rows. If there are several parts, each is
    a copy, so that one part does not keep the memory of the others alive.
    """
    parts = rows.split(list(counts))
    if len(parts) == 1:
        return parts
    return [part.clone() for part in parts]


class MedusaDrafter(BlockDrafter):
    """Drafter with Medusa heads: head i, counted from 1, predicts the i-th token after the last committed one. All
    heads read the same feature, that of the token before the last committed one.
    """

    def __init__(self, heads: MedusaHeads, keeper: SlotKeeper[HeadSlot]) -> None:
        super().__init__(keeper, heads.facts.num_heads)
        self._heads = heads

    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        if not slots:
            return False
        features = torch.cat([cache_slot_of(draft_slot).features_of(1) for draft_slot in slots])  # [S, d]
        logits = self._heads(features)  # [S, heads, V]
        num_heads = logits.shape[1]
        set_blocks(slots, [num_heads] * len(slots), logits.flatten(0, 1).cpu())
        return True


class MaskDrafter(BlockDrafter):
    """Drafter with a model or a head that predicts several tokens in one forward. Mask tokens are fed after the last
    committed token, and the logits of these rows are the distributions of the next tokens.

    After each forward the mask tokens are cut from the cache, so only committed tokens stay there.

        # committed [..., 7, 9], blocks of 3 masks: [9, MASK, MASK, MASK] is fed, and the logits of these 4 rows are the
        # distributions of the next 4 tokens
    """

    def __init__(self, feeder: Feeder, shape: BlockShape) -> None:
        super().__init__(feeder.keeper, shape.num_drafts)
        self._feeder = feeder
        self._shape = shape

    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        requests = dict[SlotKey, FeedRequest]()
        for draft_slot in slots:
            requests[draft_slot.slot.key] = FeedRequest(draft_slot, self._shape.size)
        fed = self._feeder.feed(requests, self._row, now)
        if fed is None:
            return False
        filled = list[DraftSlot]()
        counts = list[int]()
        rows, logits = fed
        for request, row in rows:
            filled.append(request.draft_slot)
            counts.append(row.num_logits)
            slot = cache_slot_of(request.draft_slot)
            num_committed = slot.num_feedable - len(slot.cached)
            slot.fed_committed(row.new_ids[:num_committed])
            slot.truncate(slot.first + len(slot.cached) + 1)  # the masks
        if filled:
            self._store_blocks(filled, counts, logits)
        return True

    def _row(self, request: FeedRequest) -> Row:
        # No masks past the end of the output: there may be no memory for them.
        slot = cache_slot_of(request.draft_slot)
        shape = self._shape
        max_block = slot.max_len - len(slot.committed) + 1
        block_ids = shape.token_ids(slot.committed[-1], max_block)  # the last committed token, then masks
        features = slot.features_of(slot.num_feedable - len(slot.cached))
        if shape.feature is not None:
            masks = shape.feature.expand(len(block_ids) - 1, -1)
            features = torch.cat([to_device(features, masks.device).to(masks.dtype), masks])
        new_ids = [*slot.uncached(), *block_ids[1:]]
        num_logits = len(block_ids) - (not shape.from_anchor)
        return Row(slot.table, new_ids, len(slot.cached), num_logits, slot.cached, features=features)

    def _store_blocks(self, filled: Sequence[DraftSlot], counts: Sequence[int], logits: Tensor) -> None:
        set_blocks(filled, counts, logits.cpu())

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


class SequentialDrafter(MaskDrafter):
    """Drafter with a DSpark head: it fills a block in one forward, and then biases the logits of each position by the
    draft token before it.
    """

    def __init__(self, feeder: Feeder, shape: BlockShape) -> None:
        super().__init__(feeder, shape)
        path = feeder.runner.path
        assert isinstance(path, HeadPath) and isinstance(path.head, DFlashHead), "a head of this kind"
        assert path.head.markov_head is not None, "a sequential head"
        self._path = path
        self._head = path.head
        self._sequential = path.head.markov_head

    def _store_blocks(self, filled: Sequence[DraftSlot], counts: Sequence[int], logits: Tensor) -> None:
        set_blocks(filled, counts, logits, self._path.hidden)

    def _rows(self, requests: Sequence[NodeRequest]) -> Iterator[tuple[HostLogits, int]]:
        # All nodes of all slots at once: most of a node's cost is reading the head's projection.
        pairs = list[tuple[DraftSlot, int]]()
        logits = list[Tensor]()
        for draft_slot, nodes in requests:
            for node in nodes:
                pairs.append((draft_slot, node))
                logits.append(block_of(draft_slot).logits[draft_slot.tree.depth(node)])
        if not pairs:
            return
        biases = self._sequential.markov_w2(self._step(pairs))
        host = HostLogits(self._head.with_biases(torch.stack(logits), biases))
        for index in range(len(pairs)):
            yield host, index

    def _step(self, pairs: Sequence[tuple[DraftSlot, int]]) -> Tensor:
        """Advance the sequential head by one token at each node, and store its states.

        # node 1 with parent 0: the state after node 0 and the token of node 1 give the state after node 1
        """
        states = list[Tensor]()
        hidden = list[Tensor]()
        token_ids = list[int]()
        for draft_slot, node in pairs:
            block = block_of(draft_slot)
            tree = draft_slot.tree
            if node == ROOT:
                state = self._sequential.begin()
                token_id = draft_slot.slot.committed[-1]
            else:
                parent = tree.parents[node]
                token_id = tree.ids[node]
                if parent not in block.states:  # it was fed under the previous block
                    self._step([(draft_slot, parent)])
                state = block.states[parent]
            states.append(state)
            hidden.append(block.hidden[tree.depth(node)])
            token_ids.append(token_id)
        before = torch.cat(states)  # [N, r]
        ids_there = to_device(np.array(token_ids), before.device)
        latents, after = self._sequential.step(ids_there, torch.stack(hidden), before)
        for (draft_slot, node), state in zip(pairs, after.unsqueeze(1), strict=True):
            block_of(draft_slot).states[node] = state
        return latents
