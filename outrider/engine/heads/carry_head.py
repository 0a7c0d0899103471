"""What the paths, the loader and the test of the wiring need of a head that joins a token with a feature.

An entry is a token and a feature, the row of the token before it that the target's `OpeningMap` made, or for a token
that follows a draft the *carry*, the head's own output there. `HeadPath` hands both to the head's forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache

from outrider.engine.heads.head_network import HeadNetwork
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.heads.reduced_vocab import spread


class HeadFacts(Protocol):
    """Facts of a head, whatever layout its files have. A dataclass, of which `dataclasses.replace` makes another."""

    @property
    def width(self) -> int:
        """d, of its features and its carries."""

    @property
    def vocab_size(self) -> int:
        """V, of the target."""

    @property
    def draft_vocab_size(self) -> int:
        """Vd, rows of the head's lm_head."""


@dataclass(frozen=True, slots=True)
class MaskEntry:
    """What stands at positions that a head fills in one go (P-EAGLE)."""

    token_id: int
    feature: Tensor
    """[d]."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as its files say it."""

    facts: Any
    """Of the head's kind."""
    tensors: Mapping[str, Tensor]
    """For the `of` of its class, in the files' dtype; embedding and lm_head may be the target's."""
    opening: OpeningMap
    """For the target, in the files' dtype."""
    undecided: tuple[str, ...]
    """Fields of `facts`, each true or false, that the files leave open: the value there is the likelier one."""
    mask: MaskEntry | None = None
    """Of a head that fills masked positions in place of going on from its carries."""


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What a forward says at the N positions that were asked for."""

    logits: Tensor
    """[1, N, V] float32 (float64 where the head is), UNMAPPED where the head has no row."""
    carries: Tensor
    """[1, N, d] in the head's dtype: the features of what follows these positions."""


class CarryHead(HeadNetwork):
    """A head that hands its own output on, as the feature of what follows."""

    def decide(self, facts: Any) -> None:
        """Go on with other facts, of which none changes a tensor."""
        self.facts = facts

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
