"""Spread the logits of a head that knows a part of the target's vocabulary over all of it."""

from __future__ import annotations

import torch
from torch import Tensor

UNMAPPED = -1e9
"""Logit of an id that the head has no row for: probability 0 after softmax, and finite, so that a check for infinities
still finds faults. Doubling it changes nothing."""


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits [..., V] of logits [..., Vd] and the target ids [Vd] int64 of their columns; None for all ids.

    The result is float32, or float64 where the logits are.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if ids is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocab_size), UNMAPPED)
    return whole.index_copy_(-1, ids, logits)
