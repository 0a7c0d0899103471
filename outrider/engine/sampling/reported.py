"""Log-probs that are reported with committed tokens: of the unmodified model, before penalties and temperature.

Called where tokens are decided: on the host for the rows of a slot, on a device for all rows of the step's one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_device

Reported = tuple[float, tuple[int, ...], tuple[float, ...]]
"""Log-prob of the token; the best ids, most likely first, the lowest first among equals; their log-probs."""


def reported(raw_logits: Tensor, token_ids: Sequence[int], num_best: int) -> list[Reported]:
    """Return what is reported of a token of each row. raw_logits [R, V] float32, finite, on the host."""
    return unpacked(packed(raw_logits, torch.tensor(token_ids), num_best).numpy(), num_best)


def packed_ranks(raw_logits: Tensor, token_ids: Sequence[int], num_best: int) -> Tensor:
    """Compute what is reported of a token of each row, and its rank, to be read by `unpacked_ranks`: raw_logits [R, V]
    float32, wherever they are -> [R, 3 + 2 num_best] float64.
    """
    chosen = to_device(np.array(token_ids, dtype=np.int64), raw_logits.device)  # [R]
    ranks = 1 + (raw_logits > raw_logits.gather(1, chosen[:, None])).sum(dim=1)
    are_finite = raw_logits.isfinite().all(dim=1)
    return torch.cat((are_finite[:, None], ranks[:, None], packed(raw_logits, chosen, num_best)), dim=1)


def unpacked_ranks(values: NDArray[np.float64], num_best: int) -> list[tuple[Reported, int]] | None:
    """Read `packed_ranks`: what is reported of each token, and its rank, 1 + how many are likelier. None where logits
    were not finite.
    """
    if not values[:, 0].all():
        return None
    return list(zip(unpacked(values[:, 2:], num_best), values[:, 1].astype(int).tolist(), strict=True))


def packed(raw_logits: Tensor, chosen: Tensor, num_best: int) -> Tensor:
    """Compute what is reported of chosen [R] int64, to be read by `unpacked`: raw_logits [R, V] float32, 0 <= num_best
    <= V -> [R, 1 + 2 num_best] float64.
    """
    log_mass = raw_logits.logsumexp(dim=1, keepdim=True).double()
    ids = raw_logits.topk(num_best, dim=1).indices.sort(dim=1).values
    best = raw_logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    own = raw_logits.gather(1, chosen[:, None])
    log_probs = torch.cat((own, best.values), dim=1).double() - log_mass
    return torch.cat((log_probs, ids.gather(1, best.indices).double()), dim=1)  # ids fit a double


def unpacked(values: NDArray[np.float64], num_best: int) -> list[Reported]:
    """Read `packed` rows, which may hold more than num_best."""
    ids_from = 1 + values.shape[1] // 2
    best, ids = values[:, 1 : 1 + num_best].tolist(), values[:, ids_from : ids_from + num_best].astype(int).tolist()
    return [(own, tuple(ids[r]), tuple(best[r])) for r, own in enumerate(values[:, 0].tolist())]
