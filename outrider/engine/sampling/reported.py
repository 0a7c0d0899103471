"""Log-probs that are reported with tokens. They are of the model's own logits, before penalties and temperature.

Called where tokens are decided. On a device they are packed into the one tensor that a step copies to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_device

Reported = tuple[float, tuple[int, ...], tuple[float, ...]]
"""Log-probs that an answer reports for one token: (log-prob of the token, ids of the likeliest tokens, their
log-probs), in nats. The likeliest id comes first, and the lowest first among equals."""


def reported(raw_logits: Tensor, token_ids: Sequence[int], num_best: int) -> list[Reported]:
    """Return the log-probs to report for one token per row. raw_logits: [R, V] float32, finite, on the host.

    token_ids: the tokens, [R]. num_best: number of best ids that are reported with each token.
    """
    return unpack(pack(raw_logits, torch.tensor(token_ids), num_best).numpy(), num_best)


def pack_ranks(raw_logits: Tensor, token_ids: Sequence[int], num_best: int) -> Tensor:
    """Return log-probs and rank of one token per row as a tensor [R, 3 + 2 num_best] float64, from which `unpack_ranks`
    reads them after the copy to the host.

    raw_logits: [R, V] float32, on any device. token_ids: the tokens, [R]. num_best: number of likeliest ids per row
    that are reported, too.
    """
    chosen = to_device(np.array(token_ids, dtype=np.int64), raw_logits.device)  # [R]
    ranks = 1 + (raw_logits > raw_logits.gather(1, chosen[:, None])).sum(dim=1)  # [R]
    are_finite = raw_logits.isfinite().all(dim=1)  # [R]
    return torch.cat((are_finite[:, None], ranks[:, None], pack(raw_logits, chosen, num_best)), dim=1)


def unpack_ranks(values: NDArray[np.float64], num_best: int) -> list[tuple[Reported, int]] | None:
    """Return log-probs and rank (1 = likeliest) of each token from the rows that `pack_ranks` made; None if any logits
    were not finite.
    """
    if not values[:, 0].all():
        return None
    return list(zip(unpack(values[:, 2:], num_best), values[:, 1].astype(int).tolist(), strict=True))


def pack(raw_logits: Tensor, chosen: Tensor, num_best: int) -> Tensor:
    """Return the log-probs to report for one token per row as a tensor [R, 1 + 2 num_best] float64, from which `unpack`
    reads them after the copy to the host.

    raw_logits: [R, V] float32. chosen: the tokens, [R] int64. num_best: number of likeliest ids per row that are
    reported, too, 0 to V.
    """
    log_mass = raw_logits.logsumexp(dim=1, keepdim=True).double()  # [R, 1]
    ids = raw_logits.topk(num_best, dim=1).indices.sort(dim=1).values  # [R, num_best]
    best = raw_logits.gather(1, ids).sort(dim=1, descending=True, stable=True)  # [R, num_best]
    own = raw_logits.gather(1, chosen[:, None])  # [R, 1]
    log_probs = torch.cat((own, best.values), dim=1).double() - log_mass  # [R, 1 + num_best]
    return torch.cat((log_probs, ids.gather(1, best.indices).double()), dim=1)  # ids fit a double


def unpack(values: NDArray[np.float64], num_best: int) -> list[Reported]:
    """Return the log-probs of each token from the rows that `pack` made. num_best: number of likeliest ids to return
    for each token; at most the number with which they were packed.
    """
    ids_from = 1 + values.shape[1] // 2
    best = values[:, 1 : 1 + num_best].tolist()
    ids = values[:, ids_from : ids_from + num_best].astype(int).tolist()
    found = list[Reported]()
    for own, own_ids, own_best in zip(values[:, 0].tolist(), ids, best, strict=True):
        found.append((own, tuple(own_ids), tuple(own_best)))
    return found
