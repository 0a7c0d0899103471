"""Penalties and logit bias as edits of single columns of the logits. Called by `penalties`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.wire.requests.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ColumnEdits:
    """Changes of the logits of N token ids at one position, by penalties and biases: a logit x becomes x * factor +
    offset if x < 0, else x / factor + offset.
    """

    ids: NDArray[np.int64]
    """Token id of each edited column, [N]."""
    factor: NDArray[np.float64]
    """Factor of each edited id, [N]: the repetition penalty if the id is in prompt or output, else 1."""
    offset: NDArray[np.float64]
    """Logit bias minus frequency and presence penalties of each id, [N]."""


class Columns:
    """Token ids (columns of the logits) whose logits a slot's penalties and biases change, with a factor and an offset
    for each, which follow from how often the id is in the output so far.

    With a repetition penalty the ids of the prompt are among them.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt = frozenset[int]()
        if params.repetition_penalty != 1.0:
            self._prompt = frozenset(prompt_ids)
        self._num_output: Counter[int] = Counter()
        ids = sorted(self._prompt | params.logit_bias.keys())
        self._place = {token_id: place for place, token_id in enumerate(ids)}
        """Index of each id among the ids whose logits are edited."""
        self._edits = ColumnEdits(*self._columns_of(ids, self._num_output))

    def add_output(self, new_ids: Sequence[int]) -> None:
        """Count new output tokens. From now on, penalties edit the logits of their ids."""
        self._num_output.update(new_ids)
        self._edits = self._with(list(dict.fromkeys(new_ids)), self._num_output)
        for token_id in self._edits.ids[len(self._place) :].tolist():
            self._place[token_id] = len(self._place)

    def forget_output(self) -> None:
        """Set the number of occurrences in the output to 0 for all ids. Ids that only the output contained stay among
        the edited ids, with edits that change nothing.
        """
        self._num_output.clear()
        self._edits = ColumnEdits(*self._columns_of(list(self._place), self._num_output))

    def after(self, draft_prefix: tuple[int, ...]) -> ColumnEdits | None:
        """Return the edits at the position after the output and the draft tokens `draft_prefix`, which are counted as
        output, too; None if no column is edited.
        """
        if not draft_prefix:
            return self._edits if self._place else None
        num_output = dict[int, int]()
        for token_id, num_drafted in Counter(draft_prefix).items():
            num_output[token_id] = num_drafted + self._num_output[token_id]
        return self._with(list(num_output), num_output)

    def _with(self, changed: list[int], num_output: Mapping[int, int]) -> ColumnEdits:
        """Return the edits with other counts of the `changed` ids; columns of new ids come last.

        ids [3, 5], changed [7, 5]: ids [3, 5, 7], with new factors and offsets of 5 and 7
        """
        changed.sort(key=lambda token_id: token_id not in self._place)  # stable: ids that have a column first
        places = [self._place[token_id] for token_id in changed if token_id in self._place]
        num_known = len(places)
        ids, factors, offsets = self._columns_of(changed, num_output)
        edits = self._edits
        factor = np.append(edits.factor, factors[num_known:])
        offset = np.append(edits.offset, offsets[num_known:])
        factor[places] = factors[:num_known]
        offset[places] = offsets[:num_known]
        return ColumnEdits(np.append(edits.ids, ids[num_known:]), factor, offset)

    def _columns_of(
        self, ids: Sequence[int], num_output: Mapping[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        params = self._params
        factors = list[float]()
        offsets = list[float]()
        for token_id in ids:
            count = num_output.get(token_id, 0)
            factor = 1.0
            if count or token_id in self._prompt:
                factor = params.repetition_penalty
            presence_penalty = 0.0
            if count:
                presence_penalty = params.presence_penalty
            factors.append(factor)
            offsets.append(params.logit_bias.get(token_id, 0.0) - params.frequency_penalty * count - presence_penalty)
        return np.array(ids, dtype=np.int64), np.array(factors), np.array(offsets)
