"""Drafts that are heads of blocks: they read the target's rows, and fill a block behind the last committed token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draft_service.block import SequentialBlock, parts_of
from draft_service.block_drafter import BlockDrafter, give_blocks, has_block, place_of
from draft_service.feeding import Feeder, cached
from draft_service.growing import Growing
from draft_service.head_slot import ContextSlot
from outrider.engine.cuda.host_copy import to_device
from outrider.engine.heads.block_path import BlockHeadPath
from outrider.engine.heads.markov import MarkovHead
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import Said, of_logits
from outrider.engine.step_plan import Row
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill


class DFlashDrafter(BlockDrafter):
    """A head that is fed rows, and then the last committed token with masks behind it, which leave nothing."""

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot], path: BlockHeadPath) -> None:
        """path: that of the feeder's runner."""
        super().__init__(keeper, path.head.facts.num_drafts)
        self._feeder = feeder
        self._path = path
        self._facts = path.head.facts

    def is_ready(self, asked: Growing) -> bool:
        slot = asked.slot
        assert isinstance(slot, ContextSlot), "the slot of a head takes rows"
        return has_block(asked) or (
            len(slot.committed) > slot.first and not slot.lacks_rows and not needs_prefill(slot)
        )

    def _make_blocks(self, asked: Sequence[Growing], now: float) -> bool:
        slots = {growing.slot.key: growing for growing in asked}
        num_new = dict.fromkeys(slots, self._facts.block_size)
        fed = self._feeder.feed(num_new, lambda key: self._row(cached(slots[key])), now)
        if fed is None:
            return False
        growing = [slots[key] for key, _ in fed.rows]
        for each, (_, row) in zip(growing, fed.rows, strict=True):
            slot = cached(each)
            assert row.features is not None, "a head reads rows"
            slot.fed_committed(row.new_ids[: len(row.features)])
            slot.truncate(len(slot.committed))
        if growing:
            self._take(growing, fed.logits, [row.num_logits for _, row in fed.rows])
        return True

    def _row(self, slot: Slot) -> Row:
        ids = slot.uncached(max(0, slot.num_feedable - len(slot.cached)))
        size = min(self._facts.block_size, slot.max_len - len(slot.committed) + 1)  # none past the answer's end
        block = [slot.committed[-1], *[self._facts.mask_id] * (size - 1)]
        num_logits = size - (not self._facts.from_anchor)
        features = slot.features_of(len(ids))
        return Row(slot.table, [*ids, *block], len(slot.cached), num_logits, slot.cached, features=features)

    def _take(self, growing: Sequence[Growing], logits: Tensor, counts: Sequence[int]) -> None:
        """Give slots their blocks, of logits [sum(counts), V]."""
        give_blocks(growing, logits, counts)

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


class DSparkDrafter(DFlashDrafter):
    """What a node's place says is biased by the node's token. A recurrent head's state after a node is kept there,
    with the place of the block that it is of.
    """

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot], path: BlockHeadPath, markov: MarkovHead) -> None:
        """markov: of the path's head."""
        super().__init__(feeder, keeper, path)
        self._markov = markov

    def _take(self, growing: Sequence[Growing], logits: Tensor, counts: Sequence[int]) -> None:
        parts = zip(growing, parts_of(logits, counts), parts_of(self._path.hidden, counts), strict=True)
        for each, said, hidden in parts:
            each.block = SequentialBlock(len(each.slot.committed) - 1, said, hidden)

    @torch.inference_mode()
    def _said(self, asked: Sequence[tuple[Growing, Sequence[int]]]) -> list[Said]:
        """All nodes of all slots at once: to read the head's projection is most of what a node costs."""
        pairs = [(growing, node) for growing, nodes in asked for node in nodes]
        if not pairs:
            return []
        logits = torch.stack([_block_of(growing).logits[place_of(growing, node)] for growing, node in pairs])  # [N, V]
        states = torch.cat([self._before(growing, node) for growing, node in pairs])  # [N, r]
        latents, states = self._step(pairs, states)
        host = HostLogits(self._path.head.with_biases(logits, self._markov.biases(latents)))
        said = list[Said]()
        for index, (growing, node) in enumerate(pairs):
            self._keep(growing, node, states[index : index + 1])
            said.append(of_logits(growing.tree, node, self._keeper.sampling_state(growing.slot), host, index))
        return said

    def _step(self, pairs: Sequence[tuple[Growing, int]], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents and states [N, r] after nodes, of the states [N, r] before them."""
        ids = [g.slot.committed[-1] if node == ROOT else g.tree.ids[node] for g, node in pairs]
        token_ids = to_device(np.array(ids), states.device)
        hidden = torch.stack([_block_of(growing).hidden[place_of(growing, node)] for growing, node in pairs])  # [N, d]
        return self._markov.step(token_ids, hidden, states)

    def _keep(self, growing: Growing, node: int, state: Tensor) -> None:
        growing.tree.states[node] = (_block_of(growing).position, state)

    def _before(self, growing: Growing, node: int) -> Tensor:
        """Return the state [1, r] before a node, under the slot's present block, in which it begins anew."""
        if node == ROOT or self._markov.kind != "rnn":
            return self._markov.begin()[None]
        tree, parent = growing.tree, growing.tree.parents[node]
        if parent not in tree.states or tree.states[parent][0] != _block_of(growing).position:
            self._keep(growing, parent, self._step([(growing, parent)], self._before(growing, parent))[1])
        state: Tensor = tree.states[parent][1]
        return state


def _block_of(growing: Growing) -> SequentialBlock:
    assert isinstance(growing.block, SequentialBlock), "it has none"
    return growing.block
