"""The paths of heads: rows bring features, and a forward leaves what the head hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.attention.fused import FusedPath
from outrider.engine.attention.fused_weights import FusedShape, pack_weights
from outrider.engine.attention.paged import PagedPath
from outrider.engine.attention.paged_plan import PagedPlan
from outrider.engine.errors import PathUnavailable
from outrider.engine.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.heads.network import BlockHead, HeadNetwork
from outrider.engine.host_copy import to_device
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.native.library import NO_LAYER, Vector
from outrider.engine.step_plan import Row


class HeadPath(PagedPath):
    """Runs the head's own modules.

    A carry head has a feature for each new token of a row. Of a head of blocks, the first new tokens of a row have
    features, which are what it reads of them, and the rest are a block: whoever feeds it truncates it away. Rows ask
    for logits of the block alone.
    """

    hidden: Tensor
    """[sum(num_logits), d] of the last forward, in the head's dtype on its device, rows in order."""

    def __init__(self, head: HeadNetwork) -> None:
        super().__init__(head, head.facts.vocab_size)
        self.head = head
        """What is decided or changed of it is so from the next forward on."""

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage and allocate it: a layer's shape is known when keys of its own reach it."""
        super().set_storage(num_blocks, block_size)
        table = KVPool(1, block_size).new_table()
        table.reserve(1)
        with torch.inference_mode():
            self.forward([Row(table, [0], 0, 0, (), features=torch.zeros(1, self.head.facts.width))])

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `hidden`."""
        head = self.head
        none = torch.empty(0, head.facts.width, dtype=head.dtype, device=head.device)
        features = torch.cat([none, *(to_device(features_of(row, head), head.device).to(head.dtype) for row in rows)])
        if isinstance(head, BlockHead):
            read, rows = _split(rows)
            if read:
                self._read(head, read, features)
            features = none
        if not rows:
            self.hidden = none
            return torch.empty(0, head.facts.vocab_size, device=head.device)
        plan = self._plan(rows)
        output = self.outputs(plan, features=features[None])
        num_wanted = plan.logits_at.shape[0]
        self.hidden = output.hidden[0, :num_wanted]
        logits: Tensor = output.logits[0, :num_wanted]
        return logits

    def _read(self, head: BlockHead, rows: Sequence[Row], features: Tensor) -> None:
        """Write the features [C, d] of rows into the cache."""
        assert self._cache is not None
        plan = self._plan(rows)
        self._cache.begin(plan)
        head.read(features[None], plan.position_ids, self._cache)

    def _plan(self, rows: Sequence[Row]) -> PagedPlan:
        assert self._cache is not None
        return PagedPlan.build(rows, self.head.device, self.head.facts.vocab_size, gathers=self._cache.gathers)


class FusedHeadPath(FusedPath):
    """Runs an EAGLE-3 head in our C++ forward, whose first layer reads features beside tokens (CPU).

    What it hands on is the hidden state tapped behind the last layer.
    """

    hidden: Tensor
    """As in `HeadPath`."""

    def __init__(self, head: Eagle3Head, facts: ModelFacts) -> None:
        """Pack the head's weights. Raises PathUnavailable, naming what this path cannot run."""
        if not head.facts.reads_normed:
            raise PathUnavailable("is made for a projection that reads the normed output")
        shape = FusedShape.of(head, head, facts)
        shape = replace(shape, head_rows=head.facts.draft_vocab_size, is_paired=True)
        self._hold(shape, *pack_weights(head, head.lm_head, shape))
        self.head = head
        self._followed: Eagle3Config | None = None

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `hidden`."""
        head = self.head
        self._follow()
        none = torch.empty(0, head.facts.width)
        read = torch.cat([none, *(features_of(row, head).float() for row in rows)])  # [T, d]
        logits = self._run(rows, read)  # [N, Vd]
        end, wanted = 0, [none]
        for row in rows:
            end += row.num_new
            wanted.append(self.features[end - row.num_logits : end, 0])
        self.hidden = torch.cat(wanted).to(head.dtype)
        return head.spread(logits)

    def _follow(self) -> None:
        """Take over what the packed weights do not have, where it has changed since the last forward."""
        facts = self.head.facts
        if facts is self._followed:
            return
        token_norm, feature_norm = self.head.joining_norms()
        self._native.vector(0, Vector.ATTENTION_NORM, token_norm.weight)
        self._native.vector(NO_LAYER, Vector.READ_NORM, feature_norm.weight)
        self._native.residual(normed=facts.norm_before_residual)
        self.set_taps([NORMED if facts.carries_normed else self._shape.num_layers])
        self._followed = facts


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the parts of rows that have features, and their blocks."""
    read, blocks = list[Row](), list[Row]()
    for row in rows:
        assert row.features is not None, "they were checked"
        num_read = len(row.features)
        if num_read:
            read.append(replace(row, new_ids=row.new_ids[:num_read], num_logits=0))
        if num_read < row.num_new:
            blocks.append(replace(row, new_ids=row.new_ids[num_read:], num_cached=row.num_cached + num_read))
    return read, blocks


def features_of(row: Row, head: HeadNetwork) -> Tensor:
    """Return the row's features [C, d]: one for each new token, and in a head of blocks for the first of them."""
    features = row.features
    assert features is not None and features.shape[1] == head.facts.width, "no features of the head's width"
    num_masks = row.num_new - len(features)
    assert num_masks == 0 or (not head.lag and num_masks >= row.num_logits), "features of other tokens"
    return features
