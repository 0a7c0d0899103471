"""Log-probs that are reported with committed tokens: of the unmodified model, before penalties and temperature.

Called where tokens are decided. On the host a row at a time; on a device all rows together, for the step's one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.candidates import Scores, exactly_best
from outrider.engine.sampling import top_logprobs

Reported = tuple[float, tuple[int, ...], tuple[float, ...]]
"""Log-prob of the token; the best ids, most likely first, the lowest first among equals; their log-probs."""


def reported(raw_logits: Tensor, token_ids: Sequence[int], num_best: int) -> list[Reported]:
    """raw_logits [R, V] float32, finite, on the host; a token of each row; 0 <= num_best <= V."""
    return [_of_row(row, i, num_best) for row, i in zip(raw_logits.numpy(), token_ids, strict=True)]


def packed(raw_logits: Tensor, chosen: Tensor, num_best: int) -> Tensor:
    """`reported` on a device, to be read by `unpacked`: chosen [R] int64 -> [R, 1 + 2 num_best] float64."""
    own, ids, values = top_logprobs(raw_logits, chosen, num_best)
    return torch.cat((own[:, None].double(), values.double(), ids.double()), dim=1)  # ids fit a double


def unpacked(values: NDArray[np.float64], num_best: int) -> list[Reported]:
    """Of `packed` rows, which may hold more than num_best."""
    ids_from = 1 + values.shape[1] // 2
    best, ids = values[:, 1 : 1 + num_best].tolist(), values[:, ids_from : ids_from + num_best].astype(int).tolist()
    return [(own, tuple(ids[r]), tuple(best[r])) for r, own in enumerate(values[:, 0].tolist())]


def _of_row(logits: Scores, token_id: int, num_best: int) -> Reported:
    best = logits.max()
    log_mass = float(best) + math.log(float(np.exp(logits - best).sum(dtype=np.float64)))
    ids = exactly_best(logits, num_best) if num_best else np.zeros(0, dtype=np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    values = (logits[ids].astype(np.float64) - log_mass).tolist()
    return float(logits[token_id]) - log_mass, tuple(ids.tolist()), tuple(values)
