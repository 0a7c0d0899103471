"""The `fused` path of an EAGLE-3 head: our C++ forward, whose first layer reads features beside tokens (CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.heads.head_path import features_of
from outrider.engine.model_runner import ModelFacts
from outrider.engine.native.library import NO_LAYER, Vector
from outrider.engine.paths.forward_path import NORMED, PathUnavailable
from outrider.engine.paths.fused import FusedPath
from outrider.engine.paths.fused_weights import KINDS, MOST_HEAD_SIZE, ROPE_TYPES, FusedShape, pack_weights
from outrider.engine.step_plan import Row


class FusedHeadPath(FusedPath):
    """Runs a head in C++. What it hands on is the hidden state tapped behind the last layer."""

    def __init__(self, head: Eagle3Head, facts: ModelFacts) -> None:
        """Pack the head's weights. Raises PathUnavailable, naming what this path cannot run."""
        shape = _shape(head, facts)
        self._hold(shape, *pack_weights(head, head.lm_head, shape))
        self.head = head
        self.hidden = torch.empty(0, shape.hidden)
        self._follows: tuple[Any, ...] = ()

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return logits as `ForwardPath` does and set `hidden`. Raises InvalidRequest as `features_of`."""
        head = self.head
        self._follow(head.layers[0])
        none = torch.empty(0, head.facts.width)
        given = [features_of(row, head).float() for row in rows]
        read = torch.cat([none, *given])  # [T, d]
        logits = self._run(rows, read)  # [N, Vd]
        ends = accumulate(row.num_new for row in rows)
        wanted = [self.features[end - row.num_logits : end, 0] for end, row in zip(ends, rows, strict=True)]
        self.hidden = torch.cat([none, *wanted]).to(head.dtype)
        return head.spread(logits)

    def _follow(self, first: Any) -> None:
        """Take over what the packed weights do not say, where it has changed since the last forward."""
        facts = self.head.facts
        now = (facts, first.input_layernorm, first.hidden_norm)
        if len(self._follows) == len(now) and all(a is b for a, b in zip(now, self._follows, strict=True)):
            return
        self._native.vector(0, Vector.ATTENTION_NORM, first.input_layernorm.weight)
        self._native.vector(NO_LAYER, Vector.READ_NORM, first.hidden_norm.weight)
        self._native.residual(normed=facts.norm_before_residual)
        self.set_taps([NORMED if facts.carries_normed else self._shape.num_layers])
        self._follows = now


def _shape(head: Eagle3Head, facts: ModelFacts) -> FusedShape:
    own, rope = head.facts, head.facts.rope.get("rope_type", "default")
    for holds, reason in (
        (head.device.type != "cpu", f"is made for cpu, not {head.device.type}"),
        (head.dtype not in KINDS, f"is made for float32 and bfloat16, not {head.dtype}"),
        (not own.reads_normed, "is made for a projection that reads the normed output"),
        (rope not in ROPE_TYPES, f"is made for the rope types {', '.join(ROPE_TYPES)}, not {rope}"),
        (own.head_dim % 8 != 0 or own.head_dim > MOST_HEAD_SIZE, f"is made for heads of 8 to 256, not {own.head_dim}"),
    ):
        if holds:
            raise PathUnavailable(reason)
    return FusedShape(
        num_layers=own.num_layers,
        hidden=own.width,
        heads=own.num_heads,
        kv_heads=own.num_kv_heads,
        head_size=own.head_dim,
        intermediate=own.ffn_width,
        vocab=own.vocab_size,
        context=facts.context_limit,
        epsilon=own.epsilon,
        attention_scale=own.head_dim**-0.5,
        dtype=head.dtype,
        windows=(0,) * own.num_layers,
        is_int8=False,
        head_rows=own.draft_vocab_size,
        is_paired=True,
    )
