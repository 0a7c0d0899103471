"""The law of what a drafter without a model has counted.

Counts take the place of a model's logits: penalties, biases, bans, temperature and cuts are applied to their logarithms
as they are to those, so that guesses lean the way that the target's tokens do.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.drafting.drafter import Counts
from outrider.engine.sampling.host_sampling import law_of
from outrider.engine.sampling.penalties import LogitRow, process_row
from outrider.engine.sampling.row_law import RowLaw


def law_of_counts(counts: Counts, row: LogitRow, vocab_size: int) -> RowLaw | None:
    """Return the law of counts under a row's parameters, None where all that was counted is banned."""
    ids, numbers = counts
    if ids.size == 1:  # what is done to the logit of one leaves it all there is
        processed = process_row(np.zeros(1, dtype=np.float32), row, ids, vocab_size)
        return None if processed[0] == -math.inf else RowLaw(vocab_size, np.zeros(1, dtype=np.float32), ids)
    shares = np.log(numbers / numbers.sum()).astype(np.float32)
    processed = process_row(shares, row, ids, vocab_size)
    if processed.max() == -math.inf:
        return None
    law = law_of(processed, row.state.params)
    return RowLaw(vocab_size, law.scores, ids if law.ids is None else ids[law.ids])
