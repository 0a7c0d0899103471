"""Drafts that say in one go what all of the next positions may hold: heads over one row of the target's, and models
that were trained to fill masks. What they say of a position does not depend on the guesses before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draft_service.block import Block, parts_of
from draft_service.feeding import Feeder, cached
from draft_service.growing import Growing
from draft_service.head_slot import HeadSlot, RowSlot, as_tensor
from outrider.engine.cuda.host_copy import to_device
from outrider.engine.heads.head_network import MaskEntry
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.speculation.drafter import Said, of_logits
from outrider.engine.step_plan import Row
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import BareSlot, Slot, needs_prefill

MASKED_POSITIONS = 8
"""Of a block: as many as released PARD drafts were trained to fill. Doubling it makes their passes wider by as many."""


class BlockDrafter(ABC):
    """Implements `NodeDrafter`."""

    takes_trees = True
    can_refeed = False

    def __init__(self, keeper: SlotKeeper[Any], num_positions: int) -> None:
        """num_positions: of a block."""
        self.max_depth = num_positions
        self._keeper = keeper

    def say(self, wanted: Sequence[tuple[Growing, Sequence[int]]], now: float) -> Sequence[Said] | None:
        has_worked = self._make_blocks([growing for growing, _ in wanted if not has_block(growing)], now)
        said = self._said([(growing, nodes) for growing, nodes in wanted if has_block(growing)])  # there was memory
        for each in said:
            each.tree.feed(each.node)
        return said if said or has_worked else None

    def _said(self, asked: Sequence[tuple[Growing, Sequence[int]]]) -> list[Said]:
        """Return what follows these nodes of slots that have blocks."""
        said = list[Said]()
        for growing, nodes in asked:
            tree, block = growing.tree, growing.block
            assert isinstance(block, Block), "it has none"
            state = self._keeper.sampling_state(growing.slot)
            for node in nodes:
                said.append(of_logits(tree, node, state, block.logits, place_of(growing, node)))
        return said

    @abstractmethod
    def _make_blocks(self, asked: Sequence[Growing], now: float) -> bool:
        """Give these slots blocks behind their last committed tokens, as far as there is room, and do what else is due.
        Return whether there was anything to do.
        """

    def keep_fed(self, asked: Growing, num_fed: int, keep: Sequence[int]) -> None:
        asked.slot.settle()

    def knows(self, asked: Growing) -> bool:
        return True

    def next_wake(self) -> float | None:
        return None


def has_block(growing: Growing) -> bool:
    """Return whether a slot has a block behind its last committed token."""
    tree, block = growing.tree, growing.block
    return block is not None and block.position == tree.committed_len - 1


def place_of(growing: Growing, node: int) -> int:
    """Return the index of what follows a node in the block of its slot."""
    assert growing.block is not None, "it has none"
    return growing.tree.committed_len - 1 + growing.tree.depth(node) - growing.block.position


def give_blocks(asked: Sequence[Growing], logits: Tensor, counts: Sequence[int]) -> None:
    """Give slots their blocks, of logits [sum(counts), V], which are waited for once."""
    for growing, own in zip(asked, parts_of(logits.cpu(), counts), strict=True):
        growing.block = Block(len(growing.slot.committed) - 1, HostLogits(own))


class MedusaDrafter(BlockDrafter):
    """Heads that say, of the target's row of the token before the last committed one, what each position may hold."""

    def __init__(self, heads: MedusaHeads, keeper: SlotKeeper[BareSlot], flush: Callable[[], None]) -> None:
        """flush: lets what is to be sent leave."""
        super().__init__(keeper, heads.facts.num_heads)
        self._heads = heads
        self._flush = flush

    def is_ready(self, asked: Growing) -> bool:
        assert isinstance(asked.slot, RowSlot), "the slot of heads takes rows"
        return has_block(asked) or asked.slot.row is not None

    @torch.inference_mode()
    def _make_blocks(self, asked: Sequence[Growing], now: float) -> bool:
        self._flush()  # no model's step does, and with enough slots one always grows
        if not asked:
            return False
        rows = []
        for growing in asked:
            assert isinstance(growing.slot, RowSlot) and growing.slot.row is not None, "it is not ready"
            rows.append(as_tensor(growing.slot.row))
        logits = self._heads(torch.stack(rows))  # [S, heads, V]
        give_blocks(asked, logits.flatten(0, 1), [logits.shape[1]] * len(asked))
        return True


class MaskedDrafter(BlockDrafter):
    """Something with a cache that is fed masks behind the committed tokens, and says at each what stands there. Only
    the committed tokens stay in the cache.
    """

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot], num_positions: int = MASKED_POSITIONS) -> None:
        super().__init__(keeper, num_positions)
        self._feeder = feeder

    def _make_blocks(self, asked: Sequence[Growing], now: float) -> bool:
        slots = {growing.slot.key: growing for growing in asked}
        num_new = dict.fromkeys(slots, self.max_depth - 1)
        fed = self._feeder.feed(num_new, lambda key: self._row(cached(slots[key])), now)
        if fed is None:
            return False
        give_blocks([slots[key] for key, _ in fed.rows], fed.logits, [row.num_logits for _, row in fed.rows])
        for key, row in fed.rows:
            slot = cached(slots[key])
            slot.fed_committed(row.new_ids[: row.num_new - row.num_logits + 1])
            slot.truncate(len(slot.committed) + 1)
        return True

    def _num_masks(self, slot: Slot) -> int:
        """Return how many masks are asked: none past the end of the answer, for which there may be no memory."""
        return min(self.max_depth - 1, slot.max_len - len(slot.committed))

    @abstractmethod
    def _row(self, slot: Slot) -> Row:
        """Return the committed tokens that are not cached, and masks, with the logits of the last one and of those."""

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


class PardDrafter(MaskedDrafter):
    """A model that was trained to fill masks."""

    def __init__(
        self, feeder: Feeder, keeper: SlotKeeper[Slot], mask_id: int, num_positions: int = MASKED_POSITIONS
    ) -> None:
        """mask_id: the id that the model was trained to fill."""
        super().__init__(feeder, keeper, num_positions)
        self._mask_id = mask_id

    def is_ready(self, asked: Growing) -> bool:
        return not needs_prefill(cached(asked))

    def _row(self, slot: Slot) -> Row:
        num_masks = self._num_masks(slot)
        ids = [*slot.uncached(), *[self._mask_id] * num_masks]
        return Row(slot.table, ids, len(slot.cached), num_masks + 1, slot.cached)


class PEagleDrafter(MaskedDrafter):
    """A head that was trained to fill masks: each is an entry of a masked id and a feature of its own."""

    def __init__(
        self, feeder: Feeder, keeper: SlotKeeper[Slot], mask: MaskEntry, num_positions: int = MASKED_POSITIONS
    ) -> None:
        super().__init__(feeder, keeper, num_positions)
        self._mask = mask

    def is_ready(self, asked: Growing) -> bool:
        slot = asked.slot
        assert isinstance(slot, HeadSlot), "a head's slot takes rows"
        return has_block(asked) or (
            len(slot.committed) > slot.first and not slot.lacks_rows and not needs_prefill(slot)
        )

    def _row(self, slot: Slot) -> Row:
        ids, num_masks = slot.uncached(), self._num_masks(slot)
        rows = to_device(slot.features_of(len(ids)), self._mask.feature.device).to(self._mask.feature.dtype)
        features = torch.cat([rows, self._mask.feature.expand(num_masks, -1)])
        new_ids = [*ids, *[self._mask.token_id] * num_masks]
        return Row(slot.table, new_ids, len(slot.cached), num_masks + 1, slot.cached, features=features)
