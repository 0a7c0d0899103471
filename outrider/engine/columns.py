"""Which columns of a slot's logits its penalties and biases name, and what they do to each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ColumnEdits:
    """x becomes x * factor + offset where it is negative, x / factor + offset elsewhere. All [N], ids distinct."""

    ids: NDArray[np.int64]
    factor: NDArray[np.float64]
    """The repetition penalty of an id in prompt or output, else 1."""
    offset: NDArray[np.float64]
    """Logit bias less frequency and presence penalties."""


class Columns:
    """Counts per token id that grow with the output; the prompt's ids are entered under a repetition penalty only."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt = frozenset(prompt_ids) if params.repetition_penalty != 1.0 else frozenset()
        self._num_output: Counter[int] = Counter()
        ids = sorted(self._prompt | params.logit_bias.keys())
        self._place = {token_id: place for place, token_id in enumerate(ids)}
        self._edits = ColumnEdits(*self._columns_of(ids, self._num_output))

    def add_output(self, new_ids: Sequence[int]) -> None:
        self._num_output.update(new_ids)
        self._edits = self._with(list(dict.fromkeys(new_ids)), self._num_output)
        for token_id in self._edits.ids[len(self._place) :].tolist():
            self._place[token_id] = len(self._place)

    def forget_output(self) -> None:
        """Columns that only the output named stay: with a count of 0 they change nothing."""
        self._num_output.clear()
        self._edits = ColumnEdits(*self._columns_of(list(self._place), self._num_output))

    def after(self, draft_prefix: tuple[int, ...]) -> ColumnEdits | None:
        """With the draft tokens counted as output; the counts themselves stay as they are. None: no column named."""
        if not draft_prefix:
            return self._edits if self._place else None
        counts = Counter(draft_prefix)
        return self._with(list(counts), {i: n + self._num_output[i] for i, n in counts.items()})

    def _with(self, changed: list[int], num_output: dict[int, int]) -> ColumnEdits:
        """A copy with other counts of the `changed` ids, those that nothing has named before at the end."""
        changed.sort(key=lambda i: i not in self._place)  # stable: known ids first
        known = [self._place[i] for i in changed if i in self._place]
        ids, factor, offset = self._columns_of(changed, num_output)
        new, edits = len(known), self._edits
        factors, offsets = np.append(edits.factor, factor[new:]), np.append(edits.offset, offset[new:])
        factors[known], offsets[known] = factor[:new], offset[:new]
        return ColumnEdits(np.append(edits.ids, ids[new:]), factors, offsets)

    def _columns_of(
        self, ids: list[int], num_output: dict[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        p = self._params
        counts = [num_output.get(i, 0) for i in ids]
        factor = [p.repetition_penalty if n or i in self._prompt else 1.0 for i, n in zip(ids, counts, strict=True)]
        offset = [
            p.logit_bias.get(i, 0.0) - p.frequency_penalty * n - (p.presence_penalty if n else 0.0)
            for i, n in zip(ids, counts, strict=True)
        ]
        return np.array(ids, dtype=np.int64), np.array(factor), np.array(offset)
