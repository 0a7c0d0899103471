"""Log-probs that are reported with committed tokens: of the unmodified model, before penalties and temperature.

Called by the verifier. On the host a row at a time; from a device with one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.candidates import Scores, exactly_best
from outrider.engine.cuda.host_copy import to_device
from outrider.engine.host_sampling import HostLogits
from outrider.engine.sampling import top_logprobs

Reported = tuple[float, tuple[int, ...], tuple[float, ...]]
"""Log-prob of the token; the best ids, most likely first, the lowest first among equals; their log-probs."""


def reported(raw_logits: Tensor, token_ids: Sequence[int], num_best: int) -> list[Reported]:
    """raw_logits [R, V] float32, finite; a token of each row; 0 <= num_best <= V."""
    if HostLogits.reads(raw_logits):
        return [_of_row(row, i, num_best) for row, i in zip(raw_logits.numpy(), token_ids, strict=True)]
    chosen = to_device(np.array(token_ids, dtype=np.int64), raw_logits.device)
    own, ids, values = top_logprobs(raw_logits, chosen, num_best)
    packed = torch.cat((own[:, None].double(), values.double(), ids.double()), dim=1).tolist()  # ids fit a double
    return [(row[0], tuple(int(i) for i in row[1 + num_best :]), tuple(row[1 : 1 + num_best])) for row in packed]


def _of_row(logits: Scores, token_id: int, num_best: int) -> Reported:
    best = logits.max()
    log_mass = float(best) + math.log(float(np.exp(logits - best).sum(dtype=np.float64)))
    ids = exactly_best(logits, num_best) if num_best else np.zeros(0, dtype=np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    values = (logits[ids].astype(np.float64) - log_mass).tolist()
    return float(logits[token_id]) - log_mass, tuple(ids.tolist()), tuple(values)
