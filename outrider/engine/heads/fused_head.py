"""The `fused` path of an EAGLE-3 head: our C++ forward, whose first layer reads features beside tokens (CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.heads.head_path import features_of
from outrider.engine.model_runner import ModelFacts
from outrider.engine.native.library import NO_LAYER, Vector
from outrider.engine.paths.forward_path import NORMED, PathUnavailable
from outrider.engine.paths.fused import FusedPath
from outrider.engine.paths.fused_weights import FusedShape, pack_weights
from outrider.engine.step_plan import Row


class FusedHeadPath(FusedPath):
    """Runs a head in C++. What it hands on is the hidden state tapped behind the last layer."""

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
