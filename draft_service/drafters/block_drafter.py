"""Drafters that propose tokens for several positions in one forward: heads that read the target's newest feature, and
models and heads that fill masks.

The logits of a position do not depend on the draft tokens before it, unless a sequential head biases them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_service.drafters.feeding import Feeder, FeedRequest, cached
from draft_service.slots.draft_slot import Block, DraftSlot, NodeRequest
from draft_service.slots.head_slot import HeadSlot, is_fed
from outrider.engine.heads.dflash import DFlashHead
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.heads.network import BlockShape
from outrider.engine.host_copy import to_device
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import NodeDistribution, NodeDrafter, of_logits
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slot_keeper import SlotKeeper


class BlockDrafter(NodeDrafter[DraftSlot]):
    """Drafter that reads the distributions after nodes from the blocks of their slots."""

    fills_blocks = True

    def __init__(self, keeper: SlotKeeper[Any], num_positions: int) -> None:
        """Create a drafter. `num_positions`: positions of a block."""
        self.max_depth = num_positions
        self._keeper = keeper

    def propose(self, requests: Sequence[NodeRequest], now: float) -> Sequence[NodeDistribution] | None:
        has_worked = self._make_blocks([growing for growing, _ in requests if growing.block is None], now)
        ready = [request for request in requests if request[0].block is not None]  # not starved of memory
        rows, outputs = self._rows(ready), list[NodeDistribution]()
        for growing, nodes in ready:
            state = self._keeper.sampling_state(growing.slot)
            for node in nodes:
                host, index = next(rows)
                outputs.append(of_logits(growing.tree, node, state, host, index))
        return outputs if outputs or has_worked else None

    def _rows(self, requests: Sequence[NodeRequest]) -> Iterator[tuple[HostLogits, int]]:
        for growing, nodes in requests:
            host = HostLogits(block_of(growing).logits)
            for node in nodes:
                yield host, growing.tree.depth(node)

    @abstractmethod
    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        """Fill blocks for these slots after their last committed tokens, as far as there is memory; prefill prompts.

        Return whether there was anything to do.
        """

    def keep_fed(self, asked: DraftSlot, num_fed: int, keep: Sequence[int]) -> None:
        asked.slot.settle()

    def is_ready(self, asked: DraftSlot) -> bool:
        return asked.block is not None or is_fed(cached(asked))


def block_of(growing: DraftSlot) -> Block:
    """Return the block of a slot that has one."""
    assert growing.block is not None, "it has none"
    return growing.block


def give_blocks(slots: Sequence[DraftSlot], counts: Sequence[int], *outputs: Tensor) -> None:
    """Set the block of each slot from its rows of the outputs.

    `counts`: rows of each slot. `outputs`: tensors [sum(counts), ...], the fields of `Block` in order.
    """
    parts = [own_parts(rows, counts) for rows in outputs]
    for growing, *block in zip(slots, *parts, strict=True):
        growing.block = Block(*block)


def own_parts(rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Return consecutive parts with `counts` rows each. No part keeps the memory of the others alive."""
    parts = rows.split(list(counts))
    return parts if len(parts) == 1 else [part.clone() for part in parts]


class MedusaDrafter(BlockDrafter):
    """Drafter with Medusa heads, which predict each position from the feature before the last committed token."""

    def __init__(self, heads: MedusaHeads, keeper: SlotKeeper[HeadSlot]) -> None:
        super().__init__(keeper, heads.facts.num_heads)
        self._heads = heads

    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        if not slots:
            return False
        logits = self._heads(torch.cat([cached(growing).features_of(1) for growing in slots]))  # [S, heads, V]
        give_blocks(slots, [logits.shape[1]] * len(slots), logits.flatten(0, 1).cpu())
        return True


class MaskDrafter(BlockDrafter):
    """Drafter with a model or a head that has a cache, which is fed masks after the last committed token.

    Nothing of a block stays in the cache but the committed tokens.
    """

    def __init__(self, feeder: Feeder, shape: BlockShape) -> None:
        super().__init__(feeder.keeper, shape.num_drafts)
        self._feeder = feeder
        self._shape = shape

    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        requests = dict[SlotKey, FeedRequest]()
        for growing in slots:
            requests[growing.slot.key] = FeedRequest(growing, self._shape.size)
        fed = self._feeder.feed(requests, self._row, now)
        if fed is None:
            return False
        filled, counts = list[DraftSlot](), list[int]()
        rows, logits = fed
        for request, row in rows:
            filled.append(request.growing)
            counts.append(row.num_logits)
            slot = cached(request.growing)
            slot.fed_committed(row.new_ids[: slot.num_feedable - len(slot.cached)])
            slot.truncate(slot.first + len(slot.cached) + 1)
        if filled:
            self._take(filled, counts, logits)
        return True

    def _row(self, request: FeedRequest) -> Row:
        """Return the row of a slot's uncached committed tokens and its masks, with the logits of the block.

        There are no masks past the end of the output: there may be no memory for them.
        """
        slot, shape = cached(request.growing), self._shape
        block_ids = shape.token_ids(slot.committed[-1], slot.max_len - len(slot.committed) + 1)
        features = slot.features_of(slot.num_feedable - len(slot.cached))
        if shape.feature is not None:
            masks = shape.feature.expand(len(block_ids) - 1, -1)
            features = torch.cat([to_device(features, masks.device).to(masks.dtype), masks])
        new_ids = [*slot.uncached(), *block_ids[1:]]
        num_logits = len(block_ids) - (not shape.from_anchor)
        return Row(slot.table, new_ids, len(slot.cached), num_logits, slot.cached, features=features)

    def _take(self, filled: Sequence[DraftSlot], counts: Sequence[int], logits: Tensor) -> None:
        give_blocks(filled, counts, logits.cpu())

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


class SequentialDrafter(MaskDrafter):
    """Drafter with a head whose logits of a position are biased by the draft token before it (DSpark)."""

    def __init__(self, feeder: Feeder, shape: BlockShape) -> None:
        super().__init__(feeder, shape)
        path = feeder.runner.path
        assert isinstance(path, HeadPath) and isinstance(path.head, DFlashHead), "a head of this family"
        assert path.head.markov_head is not None, "a sequential head"
        self._path = path
        self._head = path.head
        self._sequential = path.head.markov_head

    def _take(self, filled: Sequence[DraftSlot], counts: Sequence[int], logits: Tensor) -> None:
        give_blocks(filled, counts, logits, self._path.hidden)

    def _rows(self, requests: Sequence[NodeRequest]) -> Iterator[tuple[HostLogits, int]]:
        """Compute all nodes of all slots at once: most of a node's cost is reading the head's projection."""
        pairs = [(growing, node) for growing, nodes in requests for node in nodes]
        if not pairs:
            return
        logits = list[Tensor]()
        for growing, node in pairs:
            logits.append(block_of(growing).logits[growing.tree.depth(node)])
        biases = self._sequential.markov_w2(self._step(pairs))
        host = HostLogits(self._head.with_biases(torch.stack(logits), biases))
        for index in range(len(pairs)):
            yield host, index

    def _step(self, pairs: Sequence[tuple[DraftSlot, int]]) -> Tensor:
        states, hidden, token_ids = list[Tensor](), list[Tensor](), list[int]()
        for growing, node in pairs:
            block, tree = block_of(growing), growing.tree
            state, token_id = self._sequential.begin(), growing.slot.committed[-1]
            if node != ROOT:
                parent, token_id = tree.parents[node], tree.ids[node]
                if parent not in block.states:  # it was fed under the previous block
                    self._step([(growing, parent)])
                state = block.states[parent]
            states.append(state)
            hidden.append(block.hidden[tree.depth(node)])
            token_ids.append(token_id)
        before = torch.cat(states)  # [N, r]
        ids_there = to_device(np.array(token_ids), before.device)
        latents, after = self._sequential.step(ids_there, torch.stack(hidden), before)
        for (growing, node), state in zip(pairs, after.unsqueeze(1), strict=True):
            block_of(growing).states[node] = state
        return latents
