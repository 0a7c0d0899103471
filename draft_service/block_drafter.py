"""Drafters that propose all of the next positions in one forward: heads over the target's newest feature, models and
heads that fill masks. The logits of a position do not depend on the draft tokens before it, unless a sequential head
biases them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_service.draft_slot import Block, DraftSlot
from draft_service.feeding import Feeder, cached
from draft_service.head_slot import HeadSlot, is_fed
from outrider.engine.cuda.host_copy import to_device
from outrider.engine.heads.dflash import MarkovHead
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.heads.network import BlockShape
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import NodeDistribution, NodeDrafter, of_logits
from outrider.engine.step_plan import Row
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot


class BlockDrafter(NodeDrafter[DraftSlot]):
    """Reads what follows nodes from the blocks of their slots."""

    def __init__(self, keeper: SlotKeeper[Any], num_positions: int) -> None:
        """num_positions: of a block."""
        self.max_depth = num_positions
        self._keeper = keeper

    def propose(
        self, requests: Sequence[tuple[DraftSlot, Sequence[int]]], now: float
    ) -> Sequence[NodeDistribution] | None:
        has_worked = self._make_blocks([growing for growing, _ in requests if not has_block(growing)], now)
        outputs = self._read_blocks([request for request in requests if has_block(request[0])])  # there was memory
        for output in outputs:
            output.tree.feed(output.node)
        return outputs if outputs or has_worked else None

    def _read_blocks(self, requests: Sequence[tuple[DraftSlot, Sequence[int]]]) -> list[NodeDistribution]:
        """Return what follows these nodes of slots that have blocks."""
        outputs = list[NodeDistribution]()
        for growing, nodes in requests:
            state, logits = self._keeper.sampling_state(growing.slot), HostLogits(block_of(growing).logits)
            for node in nodes:
                outputs.append(of_logits(growing.tree, node, state, logits, growing.tree.depth(node)))
        return outputs

    @abstractmethod
    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        """Give these slots blocks behind their last committed tokens, as far as there is memory, and do what else is
        due. Return whether there was anything to do.
        """

    def keep_fed(self, asked: DraftSlot, num_fed: int, keep: Sequence[int]) -> None:
        asked.slot.settle()

    def is_ready(self, asked: DraftSlot) -> bool:
        return has_block(asked) or is_fed(cached(asked))


def has_block(growing: DraftSlot) -> bool:
    """Return whether a slot has a block behind its last committed token."""
    return growing.block is not None and growing.block.position == growing.tree.committed_len - 1


def block_of(growing: DraftSlot) -> Block:
    """Return the block of a slot that has one."""
    assert growing.block is not None, "it has none"
    return growing.block


def give_blocks(
    slots: Sequence[DraftSlot], counts: Sequence[int], logits: Tensor, hidden: Tensor | None = None
) -> None:
    """Give slots their blocks: each so many rows of the logits [sum(counts), V] and hidden states [sum(counts), d]."""
    start = 0
    for growing, count in zip(slots, counts, strict=True):
        block = growing.block = Block(len(growing.slot.committed) - 1, own_part(logits, start, count))
        if hidden is not None:
            block.hidden = own_part(hidden, start, count)
        start += count


def own_part(rows: Tensor, start: int, count: int) -> Tensor:
    """Return so many rows from `start` on, without keeping the others alive as long as these."""
    part = rows[start : start + count]
    return part if count == len(rows) else part.clone()


class MedusaDrafter(BlockDrafter):
    """Heads that propose, by the feature of the token before the last committed one, a token for each position."""

    def __init__(self, heads: MedusaHeads, keeper: SlotKeeper[HeadSlot], flush: Callable[[], None]) -> None:
        """flush: lets what is to be sent leave."""
        super().__init__(keeper, heads.facts.num_heads)
        self._heads = heads
        self._flush = flush

    @torch.inference_mode()
    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        self._flush()  # no model's step does, and with enough slots one always grows
        if not slots:
            return False
        logits = self._heads(torch.cat([cached(growing).features_of(1) for growing in slots]))  # [S, heads, V]
        give_blocks(slots, [logits.shape[1]] * len(slots), logits.flatten(0, 1).cpu())
        return True


class MaskDrafter(BlockDrafter):
    """A model or a head with a cache, fed masks behind the last committed token. Of a block nothing stays in the cache
    but the committed tokens.
    """

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot], shape: BlockShape) -> None:
        super().__init__(keeper, shape.num_drafts)
        self._feeder = feeder
        self._shape = shape

    def _make_blocks(self, slots: Sequence[DraftSlot], now: float) -> bool:
        by_key = {growing.slot.key: growing for growing in slots}
        num_new = dict.fromkeys(by_key, self._shape.size)
        fed = self._feeder.feed(num_new, lambda key: self._row(cached(by_key[key])), now)
        if fed is None:
            return False
        filled, counts = list[DraftSlot](), list[int]()
        for key, row in fed.rows:
            filled.append(by_key[key])
            counts.append(row.num_logits)
            slot = cached(by_key[key])
            slot.fed_committed(row.new_ids[: slot.num_feedable - len(slot.cached)])
            slot.truncate(slot.first + len(slot.cached) + 1)
        if filled:
            self._take(filled, counts, fed.logits)
        return True

    def _row(self, slot: Slot) -> Row:
        """Return the committed tokens that are not cached, and masks, with the logits of the block. There are none past
        the end of the output, for which there may be no memory.
        """
        shape = self._shape
        block_ids = shape.token_ids(slot.committed[-1], slot.max_len - len(slot.committed) + 1)
        features = slot.features_of(slot.num_feedable - len(slot.cached))
        if shape.feature is not None:
            masks = shape.feature.expand(len(block_ids) - 1, -1)
            features = torch.cat([to_device(features, masks.device).to(masks.dtype), masks])
        new_ids = [*slot.uncached(), *block_ids[1:]]
        num_logits = len(block_ids) - (not shape.from_anchor)
        return Row(slot.table, new_ids, len(slot.cached), num_logits, slot.cached, features=features)

    def _take(self, filled: Sequence[DraftSlot], counts: Sequence[int], logits: Tensor) -> None:
        """Give slots their blocks, of logits [sum(counts), V]."""
        give_blocks(filled, counts, logits.cpu())

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


class SequentialDrafter(MaskDrafter):
    """A head whose logits of a position are biased by the draft token before it (DSpark)."""

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot], shape: BlockShape, path: HeadPath) -> None:
        """path: of the feeder's runner."""
        super().__init__(feeder, keeper, shape)
        self._path = path
        self._sequential: MarkovHead = path.head.markov_head

    def _take(self, filled: Sequence[DraftSlot], counts: Sequence[int], logits: Tensor) -> None:
        give_blocks(filled, counts, logits, self._path.hidden)

    @torch.inference_mode()
    def _read_blocks(self, requests: Sequence[tuple[DraftSlot, Sequence[int]]]) -> list[NodeDistribution]:
        """All nodes of all slots at once: to read the head's projection is most of what a node costs."""
        pairs = [(growing, node) for growing, nodes in requests for node in nodes]
        if not pairs:
            return []
        logits = [block_of(growing).logits[growing.tree.depth(node)] for growing, node in pairs]
        biases = self._sequential.markov_w2(self._step(pairs))
        host, outputs = HostLogits(self._path.head.with_biases(torch.stack(logits), biases)), list[NodeDistribution]()
        for growing, nodes in requests:
            state = self._keeper.sampling_state(growing.slot)
            for node in nodes:
                outputs.append(of_logits(growing.tree, node, state, host, len(outputs)))
        return outputs

    def _step(self, pairs: Sequence[tuple[DraftSlot, int]]) -> Tensor:
        """Return the latents [N, r] after nodes, and keep the states after them."""
        states, hidden, token_ids = list[Tensor](), list[Tensor](), list[int]()
        for growing, node in pairs:
            states.append(self._state_before(growing, node))
            hidden.append(block_of(growing).hidden[growing.tree.depth(node)])
            token_ids.append(growing.slot.committed[-1] if node == ROOT else growing.tree.ids[node])
        before = torch.cat(states)  # [N, r]
        ids_there = to_device(np.array(token_ids), before.device)
        latents, after = self._sequential.step(ids_there, torch.stack(hidden), before)
        for (growing, node), state in zip(pairs, after.unsqueeze(1), strict=True):
            block_of(growing).states[node] = state
        return latents

    def _state_before(self, growing: DraftSlot, node: int) -> Tensor:
        """Return the state [1, r] before a node, under the slot's present block, in which it begins anew."""
        if node == ROOT:
            return self._sequential.begin()
        parent = growing.tree.parents[node]
        if parent not in block_of(growing).states:
            self._step([(growing, parent)])
        return block_of(growing).states[parent]
