"""What the paths, the loader and the test of the wiring need of a head that joins a token with a feature.

An entry is a token and a feature, the row of the token before it that the target's `OpeningMap` made, or for a token
that follows a draft the *carry*, the head's own output there. `HeadPath` hands both to the head's forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from outrider.engine.heads.head_network import HeadNetwork
from outrider.engine.heads.reduced_vocab import spread


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What a forward says at the N positions that were asked for."""

    logits: Tensor
    """[1, N, V] float32 (float64 where the head is), UNMAPPED where the head has no row."""
    carries: Tensor
    """[1, N, d] in the head's dtype: the features of what follows these positions."""


class CarryHead(HeadNetwork):
    """A head that hands its own output on, as the feature of what follows."""

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> HeadOutput:
        """Run over T entries: input_ids [1, T] int64, features [1, T, d].

        logits_to_keep: positions [N] int64 that are wanted, or how many of the last; 0 for all.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.run(input_ids, features, position_ids, past_key_values)
        wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = hidden[:, wanted]  # [1, N, d]
        normed = self.norm(hidden)
        logits = self.lm_head(self.read(hidden, normed))  # [1, N, Vd]
        carries = normed if self.facts.carries_normed else hidden
        return HeadOutput(spread(logits, self.draft_ids, self.facts.vocab_size), carries)

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        """Return the last layer's output [1, T, d]."""
        raise NotImplementedError

    def read(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """Return which of the last layer's output before and after the final norm the lm_head reads."""
        return normed
