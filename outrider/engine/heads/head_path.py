"""The paths of heads: rows bring features, and a forward leaves what the head hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.heads.network import HeadNetwork
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_runner import ModelFacts
from outrider.engine.native.library import NO_LAYER, Vector
from outrider.engine.paths.forward_path import NORMED, PathUnavailable
from outrider.engine.paths.fused import FusedPath
from outrider.engine.paths.fused_weights import FusedShape, pack_weights
from outrider.engine.paths.paged import PagedPath
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest


class HeadPath(PagedPath):
    """Runs the head's own modules.

    A carry head has a feature for each new token of a row. Of a head of blocks, the first new tokens of a row have
    features, which are what it reads of them, and the rest are a block: whoever feeds it truncates it away. Rows ask
    for logits of the block alone.
    """

    def __init__(self, head: HeadNetwork) -> None:
        super().__init__(head, head.facts.vocab_size)
        self.head = head
        """What is decided or changed of it is so from the next forward on."""
        self.hidden = torch.empty(0, head.facts.width)
        """[sum(num_logits), d] of the last forward, in the head's dtype on its device, rows in order."""

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage and allocate it: a layer's shape is known when keys of its own reach it."""
        super().set_storage(num_blocks, block_size)
        table = KVPool(1, block_size).new_table()
        table.reserve(1)
        with torch.inference_mode():
            self.forward([Row(table, [0], 0, 0, (), features=torch.zeros(1, self.head.facts.width))])

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `hidden`.

        Raises InvalidRequest for a row whose features are not of the head's width, or not as many as its new tokens:
        more than those in a head of blocks.
        """
        head = self.head
        if not rows:
            self.hidden = torch.empty(0, head.facts.width, dtype=head.dtype, device=head.device)
            return torch.empty(0, head.facts.vocab_size, device=head.device)
        features = torch.cat([to_device(features_of(row, head), head.device).to(head.dtype) for row in rows])  # [C, d]
        read, asked = ([], rows) if head.lag else _split(rows)
        plan = self._plan(asked or read)
        if not asked:
            plan = replace(plan, input_ids=plan.input_ids[:, :0])
        elif read:  # the queries are the block's: features are written alone
            before = self._plan(read)
            positions = torch.cat([before.position_ids, plan.position_ids], dim=1)
            plan = replace(plan, position_ids=positions, write_to=torch.cat([before.write_to, plan.write_to]))
        output = self.outputs(plan, features=features[None])
        num_wanted = plan.logits_at.shape[0]
        self.hidden = output.hidden[0, :num_wanted]
        logits: Tensor = output.logits[0, :num_wanted].float()
        return logits

    def _plan(self, rows: Sequence[Row]) -> PagedPlan:
        assert self._cache is not None
        return PagedPlan.build(rows, self.head.device, self.head.facts.vocab_size, gathers=self._cache.gathers)


class FusedHeadPath(FusedPath):
    """Runs an EAGLE-3 head in our C++ forward, whose first layer reads features beside tokens (CPU).

    What it hands on is the hidden state tapped behind the last layer.
    """

    def __init__(self, head: Eagle3Head, facts: ModelFacts) -> None:
        """Pack the head's weights. Raises PathUnavailable, naming what this path cannot run."""
        if not head.facts.reads_normed:
            raise PathUnavailable("is made for a projection that reads the normed output")
        shape = FusedShape.of(head, head, facts)
        shape = replace(shape, head_rows=head.facts.draft_vocab_size, is_paired=True)
        self._hold(shape, *pack_weights(head, head.lm_head, shape))
        self.head = head
        self.hidden = torch.empty(0, shape.hidden)
        self._followed: Eagle3Config | None = None

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `hidden`. Raises InvalidRequest as `features_of`."""
        head = self.head
        self._follow()
        none = torch.empty(0, head.facts.width)
        given = [features_of(row, head).float() for row in rows]
        read = torch.cat([none, *given])  # [T, d]
        logits = self._run(rows, read)  # [N, Vd]
        parts = self.features[:, 0].split([row.num_new for row in rows])
        wanted = [part[row.num_new - row.num_logits :] for part, row in zip(parts, rows, strict=True)]
        self.hidden = torch.cat([none, *wanted]).to(head.dtype)
        return head.spread(logits)

    def _follow(self) -> None:
        """Take over what the packed weights do not have, where it has changed since the last forward."""
        facts = self.head.facts
        if facts is self._followed:
            return
        first: Any = self.head.layers[0]
        token_norm, feature_norm = first.joining_norms(facts)
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
        assert row.num_logits <= row.num_new - num_read, "logits are of the block"
        if num_read:
            read.append(replace(row, new_ids=row.new_ids[:num_read], num_logits=0))
        if num_read < row.num_new:
            blocks.append(replace(row, new_ids=row.new_ids[num_read:], num_cached=row.num_cached + num_read))
    return read, blocks


def features_of(row: Row, head: HeadNetwork) -> Tensor:
    """Return the row's features [C, d]. Raises InvalidRequest as `HeadPath.forward`."""
    features, width = row.features, head.facts.width
    num_rows = row.num_new
    if features is not None and not head.lag:
        num_rows = min(num_rows, len(features))
    if features is None or features.shape != (num_rows, width):
        shape = None if features is None else list(features.shape)
        at_most = "" if head.lag else "at most "
        raise InvalidRequest(
            f"a row of {row.num_new} tokens has features {shape}, must be {at_most}{[row.num_new, width]}"
        )
    return features
