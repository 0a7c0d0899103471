"""What a request asks of the logits themselves: penalties, biases and bans, per row of a batch.

Order: repetition penalty (over prompt and output), frequency and presence penalty (over the output), logit bias,
bad words, minimum length. Draft tokens before a row's position count as output. Only the named columns are touched.
vLLM differs in two points: it adds the logit bias before the penalties, so that its repetition penalty scales the
biased logit, and it looks for the beginning of a bad word in the output alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.columns import ColumnEdits, Columns
from outrider.wire.errors import WorkerFault
from outrider.wire.params import SamplingParams

_FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class NonFiniteLogits(WorkerFault):
    """A model returned NaN or an infinity; nothing can be drawn from that."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the model returned NaN or infinite logits in rows {list(rows)} of the batch; "
            "its weights are damaged or its dtype overflows (float16 often does: use bfloat16 or float32)"
        )
        self.rows = tuple(rows)
        """Rows of the tensor that `process` was given."""


class SamplingState:
    """What one slot's parameters need to know of its tokens. Holds no counts when no penalty or bias is on."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        self.params = params
        self._output: list[int] = []
        self._num_output = 0
        self._banned = frozenset(word[0] for word in params.bad_words if len(word) == 1)
        self._long_words = tuple(tuple(word) for word in params.bad_words if len(word) > 1)
        self._context_len = max((len(word) - 1 for word in self._long_words), default=0)
        self._prompt_tail = tuple(prompt_ids[max(0, len(prompt_ids) - self._context_len) :])
        ends = params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)
        self._early_banned = frozenset(ends) if params.min_tokens else frozenset()
        self._columns = Columns(params, prompt_ids) if _is_penalised(params) else None

    @property
    def num_output(self) -> int:
        """Committed output tokens, as last set."""
        return self._num_output

    def set_output(self, ids: Sequence[int]) -> None:
        """Bring the state to the committed output `ids`. Counts only what is new when it extends the previous one."""
        self._num_output = len(ids)
        if self._columns is None and not self._long_words:
            return
        known = len(self._output)
        if self._output != list(ids[:known]):
            if self._columns is not None:
                self._columns.forget_output()
            self._output, known = [], 0
        new = ids[known:]
        self._output.extend(new)
        if self._columns is not None:
            self._columns.add_output(new)

    def edits(self, draft_prefix: tuple[int, ...]) -> ColumnEdits | None:
        """What penalties and biases change at the position after `draft_prefix`; None for nothing."""
        return self._columns.after(draft_prefix) if self._columns else None

    def banned(self, draft_prefix: tuple[int, ...], vocab_size: int) -> frozenset[int]:
        """Ids that must not come next.

        The last id of a bad word is banned when the ids before it are the last ones of prompt, output and
        `draft_prefix` together: a word is never completed in the output, even if it begins in the prompt (as in
        transformers). Bans that leave nothing of the vocabulary are lifted altogether at that position.
        """
        banned = self._banned
        if self._long_words:
            context = self._context(draft_prefix)
            banned = banned.union(
                w[-1] for w in self._long_words if context[max(0, len(context) - len(w) + 1) :] == w[:-1]
            )
        if self._num_output + len(draft_prefix) < self.params.min_tokens:
            banned = banned | self._early_banned
        if not banned:
            return banned
        banned = frozenset(i for i in banned if i < vocab_size)  # a model may end with an id that it cannot emit
        return banned if len(banned) < vocab_size else frozenset()

    def _context(self, draft_prefix: tuple[int, ...]) -> tuple[int, ...]:
        tail = self._output[max(0, len(self._output) - self._context_len) :]
        return (*self._prompt_tail, *tail, *draft_prefix)


@dataclass(frozen=True, slots=True)
class LogitRow:
    """Which request a row of logits belongs to, and where it stands in it."""

    state: SamplingState
    draft_prefix: tuple[int, ...] = ()
    """Draft tokens between the committed ones and this position."""


def _is_penalised(params: SamplingParams) -> bool:
    off = params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
    return not off or bool(params.logit_bias)


def process(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """Penalties, biases and bans of each row's request. [R, V] float32 -> [R, V] float32, -inf where banned.

    Never changes `logits` (log-probs are reported from it) and returns it as it is when no row asks for anything.
    Every row of the result has a finite value. Raises NonFiniteLogits, naming the rows.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests' rows")
    _check_finite(logits)
    edits = [(r, found) for r, row in enumerate(rows) if (found := row.state.edits(row.draft_prefix)) is not None]
    bans = [(r, i) for r, row in enumerate(rows) for i in row.state.banned(row.draft_prefix, logits.shape[1])]
    if not edits and not bans:
        return logits
    processed = logits.clone()
    if edits:
        _penalise(processed, rows, edits)
    if bans:
        cells = torch.tensor(bans, device=processed.device)  # [N, 2] int64
        processed[cells[:, 0], cells[:, 1]] = -torch.inf
    return processed


def _check_finite(logits: Tensor) -> None:
    if bool(logits.sum(dim=1).isfinite().all()):  # one pass; the exact test runs only when it could fail
        return
    bad = (~logits.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
    if bad:
        raise NonFiniteLogits(bad)


def _penalise(processed: Tensor, rows: Sequence[LogitRow], found: list[tuple[int, ColumnEdits]]) -> None:
    """In place, on the named columns. Transformers' repetition penalty, OpenAI's frequency and presence penalties."""
    sizes = [edits.ids.size for _, edits in found]
    params = [rows[r].state.params for r, _ in found]
    on = processed.device

    def per_column(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values), sizes)).to(on)  # [sum(N)]

    def joined(parts: list[NDArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(on)  # [sum(N)]

    where = (per_column([r for r, _ in found]), joined([e.ids for _, e in found]))
    num_output = joined([e.num_output for _, e in found])
    seen = joined([e.in_prompt for _, e in found]) | (num_output > 0)
    penalty = per_column([p.repetition_penalty for p in params])
    x = processed[where].double()  # float64: a tiny penalty must not divide by zero
    x = torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x)
    x -= per_column([p.frequency_penalty for p in params]) * num_output
    x -= per_column([p.presence_penalty for p in params]) * (num_output > 0)
    x += joined([e.bias for _, e in found])
    processed[where] = x.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).float()
