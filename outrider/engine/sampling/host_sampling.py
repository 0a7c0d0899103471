"""From one row of logits to its law, on the host: candidates first, then the rest of the chain on those alone. NumPy.

The law is `sampling.distributions`, in torch for a batch on any device; this stands in for it on the CPU alone, behind
`draw_tokens` and `decide`: one row at a time stays in the processor's cache, and is not looked at when nobody needs it.
Of a step of the demo target with one verify of 6 rows it saves (`make bench-sampling`, 95 % intervals): greedy 14 %
(12 to 17), temperature 43 % (32 to 55), lenience 23 % (18 to 27), top-k with top-p 129 % (113 to 145), penalties 53 %
(42 to 64), coupled 88 % (80 to 96); of the step of a 94M target 2, 7, 4, 21, 7 and 18 %;
of a step of the demo target with 128,256 ids 26, 63, 54, 278, 126 and 593 %.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, process_row
from outrider.engine.sampling.row_law import COLDEST, Ids, RowLaw, Scores, exactly_best, kth_best, nucleus
from outrider.wire.requests.params import SamplingParams


class HostLogits:
    """Reads the logits of a step row by row."""

    @staticmethod
    def reads(logits: Tensor) -> bool:
        """Return whether the host can read the logits where they are; others are computed with on their device."""
        return logits.device.type == "cpu"

    def __init__(self, logits: Tensor) -> None:
        """Take logits [R, V] float32, copied from a device if they are there."""
        self._rows = logits.cpu().numpy()
        self._told: Callable[[Scores], Scores] | None = None

    def told(self, tell: Callable[[Scores], Scores]) -> HostLogits:
        """Return the same rows over the tokens of another vocabulary. tell: makes its logits of a row's, -inf for those
        of which nothing is known.
        """
        other = copy.copy(self)
        other._told = tell
        return other

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def vocab_size(self) -> int:
        return self._rows.shape[1]  # type: ignore[no-any-return]

    def raw_best_id(self, index: int) -> int:
        """Return the id of the largest logit of row `index`, whatever a request asks."""
        return int(self._rows[index].argmax())

    def best_id(self, index: int, row: LogitRow, guess: int | None = None) -> int:
        """Return the best id of row `index`, the lowest among equals, or a guess with `lenience` times its probability.
        Raises NonFiniteLogits.
        """
        processed, lenience = self._processed(index, row), row.state.params.lenience
        best = int(processed.argmax())
        if guess is not None and lenience < 1.0 and processed[guess] >= processed[best] + math.log(lenience):
            return guess
        return best

    def ranked(self, index: int, row: LogitRow, num: int) -> tuple[list[int], list[float]]:
        """Return the `num` best ids of row `index`, best first and the lowest first among equals, fewer where the rest
        is banned, and their probabilities at temperature 1. Raises NonFiniteLogits.
        """
        processed = self._processed(index, row)
        ids = exactly_best(processed, min(num, processed.size))
        ids = ids[np.argsort(-processed[ids], kind="stable")]
        ids = ids[processed[ids] > -math.inf]
        if not ids.size:
            return [], []
        best = processed[ids[0]]
        total = float(np.exp(processed - best, dtype=np.float64).sum())
        return ids.tolist(), (np.exp(processed[ids] - best, dtype=np.float64) / total).tolist()

    def law(self, index: int, row: LogitRow) -> RowLaw:
        """Return the law that the token of row `index` is drawn from. Raises NonFiniteLogits."""
        return law_of(self._processed(index, row), row.state.params)

    def law_if_any(self, index: int, row: LogitRow) -> RowLaw | None:
        """Do as `law`; None where all is banned of which anything is known."""
        processed = self._processed(index, row)
        is_known = self._told is None or processed.max() > -math.inf
        return law_of(processed, row.state.params) if is_known else None

    def _processed(self, index: int, row: LogitRow) -> Scores:
        logits = self._rows[index]
        if not (logits.min() > -math.inf and logits.max() < math.inf):  # a NaN makes both NaN
            raise NonFiniteLogits([index])
        return process_row(logits if self._told is None else self._told(logits), row)


def law_of(processed: Scores, params: SamplingParams) -> RowLaw:
    """Return the law of logits [V] float32, -inf where banned and one finite. Temperature 0: all on the best id."""
    if params.greedy:
        return RowLaw(processed.size, np.zeros(1, dtype=np.float32), processed.argmax(keepdims=True))
    values, ids = processed, None
    if 0 < params.top_k < processed.size:
        ids = np.flatnonzero(processed >= kth_best(processed, params.top_k))  # all that tie with the k-th best
        values = processed[ids]
    with np.errstate(over="ignore"):
        scores = values - values.max()  # the largest is 0
        if params.temperature != 1.0:
            scores /= np.float32(max(params.temperature, COLDEST))
    if params.top_p < 1.0:
        scores, ids = _kept(scores, ids, nucleus(scores, params.top_p))
    if params.min_p > 0.0:
        bound = np.float32(math.log(params.min_p))
        scores, ids = _kept(scores, ids, np.flatnonzero(scores >= bound))
    return RowLaw(processed.size, scores, ids)


def _kept(scores: Scores, ids: Ids | None, places: Ids) -> tuple[Scores, Ids]:
    return scores[places], places if ids is None else ids[places]
