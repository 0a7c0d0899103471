"""The distribution that a drafter without a model makes from counts of tokens.

The logarithms of counts take the place of logits: penalties, biases, bans, temperature and cuts are applied to them, as
the target applies them to its logits.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.drafting.sequence_drafter import Counts
from outrider.engine.sampling.host_sampling import distribution_of
from outrider.engine.sampling.penalties import LogitRow, process_row
from outrider.engine.sampling.token_distribution import TokenDistribution


def distribution_of_counts(counts: Counts, row: LogitRow, vocab_size: int) -> TokenDistribution | None:
    """Return the distribution in which each id's probability is proportional to its count, after the grammar,
    penalties, bans and sampling parameters of the slot and position `row`. Return None if all counted ids are banned.
    """
    ids, numbers = counts
    if ids.size == 1:  # one id has all the mass, whatever penalties do to it, unless it is banned
        processed = process_row(np.zeros(1, dtype=np.float32), row, ids, vocab_size)
        if processed[0] == -math.inf:
            return None
        return TokenDistribution(vocab_size, np.zeros(1, dtype=np.float32), ids)
    log_probs = np.log(numbers / numbers.sum()).astype(np.float32)  # [N]
    processed = process_row(log_probs, row, ids, vocab_size)  # [N]
    if processed.max() == -math.inf:
        return None
    distribution = distribution_of(processed, row.state.params)  # over places among `ids`
    if distribution.ids is not None:
        ids = ids[distribution.ids]
    return TokenDistribution(vocab_size, distribution.scores, ids)
