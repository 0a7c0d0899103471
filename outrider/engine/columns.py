"""Which columns of a slot's logits its penalties and biases name, and how often each stands in its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ColumnEdits:
    """Columns of one row and what penalties need to know of each. All [N], ids distinct."""

    ids: NDArray[np.int64]
    num_output: NDArray[np.int64]
    """Occurrences in the output."""
    in_prompt: NDArray[np.bool_]
    """Only filled in under a repetition penalty."""
    bias: NDArray[np.float64]


class Columns:
    """Counts per token id that grow with the output; the prompt's ids are entered under a repetition penalty only."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        prompt = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        ids = sorted(prompt | params.logit_bias.keys())
        self._place = {token_id: place for place, token_id in enumerate(ids)}
        self._edits = ColumnEdits(
            np.array(ids, dtype=np.int64),
            np.zeros(len(ids), dtype=np.int64),
            np.array([i in prompt for i in ids], dtype=np.bool_),
            np.array([params.logit_bias.get(i, 0.0) for i in ids], dtype=np.float64),
        )

    def add_output(self, new_ids: Sequence[int]) -> None:
        unknown = [i for i in dict.fromkeys(new_ids) if i not in self._place]
        if unknown:
            self._place |= {token_id: len(self._place) + i for i, token_id in enumerate(unknown)}
            self._edits = _extended(self._edits, unknown)
        np.add.at(self._edits.num_output, [self._place[i] for i in new_ids], 1)

    def forget_output(self) -> None:
        """Columns that only the output named stay: with a count of 0 they change nothing."""
        self._edits.num_output[:] = 0

    def after(self, draft_prefix: tuple[int, ...]) -> ColumnEdits | None:
        """With the draft tokens counted as output; the counts themselves stay as they are. None: no column named."""
        if not draft_prefix:
            return self._edits if self._place else None
        unknown = [i for i in dict.fromkeys(draft_prefix) if i not in self._place]
        places = {token_id: len(self._place) + i for i, token_id in enumerate(unknown)}
        edits = _extended(self._edits, unknown)
        np.add.at(edits.num_output, [places[i] if i in places else self._place[i] for i in draft_prefix], 1)
        return edits


def _extended(edits: ColumnEdits, ids: list[int]) -> ColumnEdits:
    """A copy with new columns that nothing has named before."""
    return ColumnEdits(
        np.append(edits.ids, np.array(ids, dtype=np.int64)),
        np.append(edits.num_output, np.zeros(len(ids), dtype=np.int64)),
        np.append(edits.in_prompt, np.zeros(len(ids), dtype=np.bool_)),
        np.append(edits.bias, np.zeros(len(ids))),
    )
