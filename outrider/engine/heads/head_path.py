"""Attention paths of heads: their rows carry features, and a forward keeps the hidden states that the head passes on to
the next token.
"""

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
from outrider.engine.native.library import NO_LAYER, VectorName
from outrider.engine.step_plan import Row


class HeadPath(PagedPath):
    """Attention path that runs the modules of a head's network, on paged keys and values.

    In a carry head each new token of a row has a feature. In a block head only a row's first C new tokens have
    features: these tokens are not fed, but their features are written into the cache at their positions. The tokens
    after them are a block, which must be removed from the block table after the forward. Rows request logits of the
    block alone.
    """

    hidden: Tensor
    """Hidden states [sum(num_logits), d] of the last forward at the positions whose logits were requested, in the order
    of the rows, in the head's dtype on its device."""

    def __init__(self, head: HeadNetwork) -> None:
        super().__init__(head, head.facts.vocab_size)
        self.head = head
        """The head's network. If its configuration (`head.facts`) is replaced, the next forward uses the new one."""

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage of keys and values by one of `num_blocks` blocks of `block_size` tokens. It is allocated
        by a forward of one token, which shows the shape of each layer's keys.
        """
        super().set_storage(num_blocks, block_size)
        table = KVPool(1, block_size).new_table()
        table.reserve(1)
        with torch.inference_mode():
            self.forward([Row(table, [0], 0, 0, (), features=torch.zeros(1, self.head.facts.width))])

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run the head over the rows. Return the logits of each row's last `num_logits` tokens,
        [sum(num_logits), V] float32 in the order of the rows, and set `hidden` to the hidden states of these tokens.
        """
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
        num_logits = plan.logits_at.shape[0]
        self.hidden = output.hidden[0, :num_logits]  # [N, d]
        logits: Tensor = output.logits[0, :num_logits]  # [N, V] float32
        return logits

    def _read(self, head: BlockHead, rows: Sequence[Row], features: Tensor) -> None:
        assert self._cache is not None
        plan = self._plan(rows)
        self._cache.begin(plan)
        head.read(features[None], plan.position_ids, self._cache)

    def _plan(self, rows: Sequence[Row]) -> PagedPlan:
        assert self._cache is not None
        return PagedPlan.build(
            rows, self.head.device, self.head.facts.vocab_size, needs_gather=self._cache.needs_gather
        )


class FusedHeadPath(FusedPath):
    """Attention path that runs an EAGLE-3 head in our C++ forward (CPU). The first layer reads features and token
    embeddings. The hidden states in `hidden` are the features of the next tokens.
    """

    hidden: Tensor
    """Hidden states [sum(num_logits), d] of the last forward at the positions whose logits were requested, in the order
    of the rows, in the head's dtype."""

    def __init__(self, head: Eagle3Head, facts: ModelFacts) -> None:
        """Pack the head's weights for the C++ forward. Raises a `PathUnavailable` that names what this path cannot
        run.
        """
        if not head.facts.is_lm_head_normed:
            raise PathUnavailable("is made for a projection that reads the normed output")
        shape = FusedShape.of(head, head, facts)
        shape = replace(shape, lm_head_rows=head.facts.draft_vocab_size, is_paired=True)
        self._hold(shape, *pack_weights(head, head.lm_head, shape))
        self.head = head
        self._followed: Eagle3Config | None = None

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run the head over the rows. Return the logits of each row's last `num_logits` tokens,
        [sum(num_logits), V] float32 in the order of the rows, and set `hidden` to the hidden states of these tokens.
        """
        head = self.head
        self._follow()
        none = torch.empty(0, head.facts.width)
        read = torch.cat([none, *(features_of(row, head).float() for row in rows)])  # [T, d]
        logits = self._run(rows, read)  # [N, Vd]
        end = 0
        hidden = [none]
        for row in rows:
            end += row.num_new
            hidden.append(self.features[end - row.num_logits : end, 0])  # [num_logits, d]
        self.hidden = torch.cat(hidden).to(head.dtype)  # [N, d]
        return head.spread(logits)

    def _follow(self) -> None:
        facts = self.head.facts
        if facts is self._followed:
            return
        token_norm, feature_norm = self.head.joining_norms()
        self._native.set_vector(0, VectorName.ATTENTION_NORM, token_norm.weight)
        self._native.set_vector(NO_LAYER, VectorName.READ_NORM, feature_norm.weight)
        self._native.set_residual(normed=facts.norm_before_residual)
        self.set_taps([NORMED if facts.is_carry_normed else self._shape.num_layers])
        self._followed = facts


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
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
    """Return the features [C, d] of a row, after asserting their number and width. In a carry head each new token has a
    feature (C = num_new), in a block head the first C new tokens.
    """
    features = row.features
    assert features is not None and features.shape[1] == head.facts.width, "no features of the head's width"
    num_masks = row.num_new - len(features)
    assert num_masks == 0 or (not head.lag and num_masks >= row.num_logits), "features of other tokens"
    return features
