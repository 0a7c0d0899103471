"""The path of a head that fills blocks: rows of the target's go into its cache, and a block is asked over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.heads.dflash import DFlashHead
from outrider.engine.heads.head_path import allocate
from outrider.engine.paths.paged import PagedPath
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest


class BlockHeadPath(PagedPath):
    """Runs the head's own modules. Of a `Row`'s new tokens the first have features, which are what is read of them, and
    the rest are a block: whoever feeds it truncates it away. Rows ask for logits of the block alone.
    """

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head, head.facts.vocab_size)
        self.head = head
        self.hidden = torch.empty(0, head.facts.width)
        """[sum(num_logits), d] of the last forward, in the head's dtype on its device, rows in order."""

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage and allocate it."""
        super().set_storage(num_blocks, block_size)
        assert self._cache is not None
        allocate(self._cache, self.head)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `hidden`.

        Raises InvalidRequest for a row whose features are not of the head's width, or more than its new tokens.
        """
        assert self._cache is not None
        head, vocab_size = self.head, self.head.facts.vocab_size
        split = [_split(row, head.facts.width) for row in rows]
        read, blocks = [row for row, _ in split if row is not None], [row for _, row in split if row is not None]
        none = torch.empty(0, head.facts.width, dtype=head.dtype, device=head.device)
        given = [to_device(row.features, head.device).to(head.dtype) for row in read if row.features is not None]
        features = torch.cat([none, *given])  # [C, d]
        if not blocks:
            self.hidden = none
            if read:
                plan = PagedPlan.build(read, head.device, vocab_size)
                self.outputs(replace(plan, input_ids=plan.input_ids[:, :0]), features=features[None])
            return torch.empty(0, vocab_size, device=head.device)
        plan = PagedPlan.build(blocks, head.device, vocab_size)
        if read:  # the queries are the block's: rows are written alone
            before = PagedPlan.build(read, head.device, vocab_size)
            positions = torch.cat([before.position_ids, plan.position_ids], dim=1)
            plan = replace(plan, position_ids=positions, write_to=torch.cat([before.write_to, plan.write_to]))
        output = self.outputs(plan, features=features[None])
        num_wanted = plan.logits_at.shape[0]
        self.hidden = output.hidden[0, :num_wanted]
        logits: Tensor = output.logits[0, :num_wanted].float()
        return logits


def _split(row: Row, width: int) -> tuple[Row | None, Row | None]:
    """Return the part of a row that has features, and its block, each None where there is none."""
    num_read = 0 if row.features is None else len(row.features)
    if row.features is not None and (row.features.shape != (num_read, width) or num_read > row.num_new):
        raise InvalidRequest(
            f"a row of {row.num_new} tokens has features {list(row.features.shape)}, must be at most "
            f"{[row.num_new, width]}"
        )
    num_cached, ids = row.num_cached + num_read, row.new_ids
    assert row.num_logits <= row.num_new - num_read, "logits are of the block"
    read = replace(row, new_ids=ids[:num_read], num_logits=0) if num_read else None
    block = None
    if num_read < row.num_new:
        block = replace(row, new_ids=ids[num_read:], num_cached=num_cached, features=None)
    return read, block
