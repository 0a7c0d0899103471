"""Apply what a request asks of the logits themselves: a grammar, penalties, biases and bans.

Order: grammar, repetition penalty (over prompt and output), frequency and presence penalty (over the output), logit
bias, bad words, minimum length. Draft tokens before a row's position count as output. Without a grammar only the named
columns are touched.

The grammar always wins: bans apply among what it allows, and are lifted where they would leave nothing of that. What
truncates a law comes after all of these and sees what they left.

vLLM differs in two points: it adds the logit bias before the penalties, so that its repetition penalty scales the
biased logit, and it looks for the beginning of a bad word in the output alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.grammar import Grammar, GrammarState, Mask, MaskBits
from outrider.engine.sampling.row_law import Array, Ids, Scores
from outrider.wire.errors import WorkerFault
from outrider.wire.requests.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ColumnEdits:
    """Columns to be changed: x becomes x * factor + offset where it is negative, else x / factor + offset. All [N]."""

    ids: NDArray[np.int64]
    factor: NDArray[np.float64]
    """The repetition penalty of an id in prompt or output, else 1."""
    offset: NDArray[np.float64]
    """Logit bias less frequency and presence penalties."""


class Columns:
    """The columns that penalties and biases name, with counts that grow with the output. The prompt's ids are among
    them under a repetition penalty only.
    """

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
        """Set all counts to 0. Columns that only the output named stay, and change nothing."""
        self._num_output.clear()
        self._edits = ColumnEdits(*self._columns_of(list(self._place), self._num_output))

    def after(self, draft_prefix: tuple[int, ...]) -> ColumnEdits | None:
        """Return the edits with the draft tokens counted as output, None when no column is named. Keeps the counts."""
        if not draft_prefix:
            return self._edits if self._place else None
        counts = Counter(draft_prefix)
        return self._with(list(counts), {i: n + self._num_output[i] for i, n in counts.items()})

    def _with(self, changed: list[int], num_output: dict[int, int]) -> ColumnEdits:
        """Return the edits with other counts of the `changed` ids, those that nothing has named before at the end."""
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


_FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class NonFiniteLogits(WorkerFault):
    """Raised when a model returned NaN or an infinity: nothing can be drawn from that."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the model returned NaN or infinite logits in rows {list(rows)} of the batch; "
            "its weights are damaged or its dtype overflows (float16 often does: use bfloat16 or float32)"
        )
        self.rows = tuple(rows)
        """Rows of the batch."""


class SamplingState:
    """Holds what one slot's parameters need to know of its tokens. Counts nothing when no penalty or bias is on."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """grammar: that of the parameters, compiled; None without one, and in a draft that cannot follow it."""
        self.params = params
        self._output: list[int] = []
        self._num_output = 0
        self._banned = frozenset(word[0] for word in params.bad_words if len(word) == 1)
        self._last_ids: dict[tuple[int, ...], list[int]] = {}
        """By all but the last id of a bad word: the ids that complete one."""
        for word in params.bad_words:
            if len(word) > 1:
                self._last_ids.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._begin_lens = sorted({len(beginning) for beginning in self._last_ids})
        self._context_len = max(self._begin_lens, default=0)
        self._prompt_tail = tuple(prompt_ids[max(0, len(prompt_ids) - self._context_len) :])
        ends = params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)
        self._early_banned = frozenset(ends) if params.min_tokens else frozenset()
        self._columns = Columns(params, prompt_ids) if _is_penalised(params) else None
        self._grammar = None if grammar is None else GrammarState(grammar)
        bans = bool(params.bad_words or self._early_banned)
        self.plain = self._columns is None and self._grammar is None and not bans
        """Whether nothing is ever asked of the logits."""

    @property
    def num_output(self) -> int:
        """Committed output tokens, as last set."""
        return self._num_output

    def set_output(self, ids: Sequence[int]) -> None:
        """Bring the state to the committed output `ids`. Counts only what is new when it extends the previous one."""
        self._num_output = len(ids)
        if self._grammar is not None:
            self._grammar.set_output(ids)
        if self._columns is None and not self._last_ids:
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
        """Return what penalties and biases change at the position after `draft_prefix`; None for nothing."""
        return self._columns.after(draft_prefix) if self._columns else None

    def allowed(self, draft_prefix: tuple[int, ...]) -> Mask | None:
        """Return which ids the grammar lets come at the position after `draft_prefix`; None for all of them.

        None also for a prefix that the grammar does not lead to: the token before has probability 0, and nothing is
        decided by what follows it.
        """
        return self._grammar.allowed(draft_prefix) if self._grammar else None

    def allowed_bits(self, draft_prefix: tuple[int, ...]) -> MaskBits | None:
        """Return what `allowed` does, a bit an id."""
        return self._grammar.allowed_bits(draft_prefix) if self._grammar else None

    def failure(self, draft_prefix: tuple[int, ...]) -> str | None:
        """Return why the grammar can be followed no further than to `draft_prefix`; None where it can."""
        return self._grammar.failure(draft_prefix) if self._grammar else None

    def forced(self) -> list[int]:
        """Return the ids that follow the output where the grammar leaves no choice."""
        return self._grammar.forced() if self._grammar else []

    def banned(self, draft_prefix: tuple[int, ...], vocab_size: int) -> frozenset[int]:
        """Return the ids that must not come next, of those that the grammar allows.

        The last id of a bad word is banned when the ids before it are the last ones of prompt, output and
        `draft_prefix` together: a word is never completed in the output, even if it begins in the prompt (as in
        transformers). Bans that leave nothing of the vocabulary, or of what the grammar allows of it, are lifted
        altogether at that position.
        """
        banned = self._banned
        if self._last_ids:
            context = self._context(draft_prefix)
            ends = (context[-size:] for size in self._begin_lens)
            banned = banned.union(*(self._last_ids.get(end, ()) for end in ends))
        if self._num_output + len(draft_prefix) < self.params.min_tokens:
            banned = banned | self._early_banned
        if not banned:
            return banned
        banned = frozenset(i for i in banned if i < vocab_size)  # a model may end with an id that it cannot emit
        allowed = self.allowed(draft_prefix)
        if allowed is not None:
            banned, vocab_size = frozenset(i for i in banned if allowed[i]), int(allowed.sum())
        return banned if len(banned) < vocab_size else frozenset()

    def _context(self, draft_prefix: tuple[int, ...]) -> tuple[int, ...]:
        tail = self._output[max(0, len(self._output) - self._context_len) :]
        return (*self._prompt_tail, *tail, *draft_prefix)


@dataclass(frozen=True, slots=True)
class LogitRow:
    """The request that a row of logits belongs to, and its place in it."""

    state: SamplingState
    draft_prefix: tuple[int, ...] = ()
    """Draft tokens between the committed ones and this position."""


def _is_penalised(params: SamplingParams) -> bool:
    off = params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
    return not off or bool(params.logit_bias)


def sound_rows(logits: Tensor) -> Tensor:
    """Return whether every logit of a row is a finite number: [R, V] -> [R] bool."""
    low, high = logits.aminmax(dim=1)
    return (low > -torch.inf) & (high < torch.inf)  # a NaN anywhere makes both NaN


def process_unchecked(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """Apply each row's request: [R, V] float32 -> [R, V] float32, -inf where banned.

    Never changes `logits` (log-probs are reported from it) and returns it as it is when no row asks for anything.
    A row of finite logits keeps a finite value; others may hold anything. The host waits for nothing here.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests' rows")
    asking = [(r, row) for r, row in enumerate(rows) if not row.state.plain]
    edits = [(r, found) for r, row in asking if (found := row.state.edits(row.draft_prefix)) is not None]
    bans = [(r, i) for r, row in asking for i in row.state.banned(row.draft_prefix, logits.shape[1])]
    masks = [(r, bits) for r, row in asking if (bits := row.state.allowed_bits(row.draft_prefix)) is not None]
    if not edits and not bans and not masks:
        return logits
    processed = logits.clone()
    if edits:
        _penalise(processed, edits)
    if bans:
        cells = to_device(np.array(bans, dtype=np.int64).T.copy(), processed.device)  # [2, N] int64
        lowest = processed.new_full((), -torch.inf)  # a number of the host would go up by a copy that waits
        processed.index_put_((cells[0], cells[1]), lowest)
    if masks:
        masked = to_device(np.array([r for r, _ in masks]), processed.device)
        bits = to_device(np.stack([bits for _, bits in masks]), processed.device)  # [M, ceil(V / 32) * 4] uint8
        banned = _is_clear(bits, processed.shape[1])
        processed[masked] = processed[masked].masked_fill(banned, -torch.inf)
    return processed


def _is_clear(bits: Tensor, num_ids: int) -> Tensor:
    """Return which ids' bits are 0: masks as `MaskBits` [M, B] uint8 -> [M, num_ids] bool."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    each = bits[:, :, None] >> places & 1  # [M, B, 8]
    return each.flatten(1)[:, :num_ids] == 0


def process_row(logits: Scores, row: LogitRow, ids: Ids | None = None, vocab_size: int | None = None) -> Scores:
    """Process one row on the host: [N] float32 -> [N] float32, the same array when nothing is asked.

    ids [N]: ascending, what the logits are of; the rest of the vocabulary is banned. None: logits of all ids. With ids
    nothing may be left: -inf everywhere.
    """
    if row.state.plain:
        return logits
    edits = row.state.edits(row.draft_prefix)
    banned = row.state.banned(row.draft_prefix, vocab_size or logits.size)
    allowed = row.state.allowed(row.draft_prefix)
    if edits is None and not banned and allowed is None:
        return logits
    processed = logits.copy()
    if edits is not None:
        places, named = _places(ids, edits.ids)
        processed[places] = _edited(logits[places].astype(np.float64), edits.factor[named], edits.offset[named])
    if banned:
        processed[_places(ids, np.array(list(banned), dtype=np.int64))[0]] = -np.inf
    if allowed is not None:
        processed[~(allowed if ids is None else allowed[ids])] = -np.inf
    return processed


def _places(ids: Ids | None, wanted: Ids) -> tuple[Ids, Any]:
    """Return where those of `wanted` [M] lie that are among `ids`, and an index [M] of these; ids None: all are."""
    if ids is None:
        return wanted, slice(None)
    places = np.minimum(np.searchsorted(ids, wanted), ids.size - 1)
    found = ids[places] == wanted
    return places[found], found


def _edited(x: Array, factor: Array, offset: Array) -> Array:
    """Return what penalties and biases make of logits x, all [N] float64, of NumPy or torch: in float32 a tiny penalty
    might divide by zero.
    """
    where: Any = torch.where if isinstance(x, Tensor) else np.where
    with np.errstate(over="ignore"):
        edited: Array = where(x < 0, x * factor, x / factor) + offset
    return edited.clip(-_FLOAT32_MAX, _FLOAT32_MAX)


def _penalise(processed: Tensor, found: list[tuple[int, ColumnEdits]]) -> None:
    """Change the named columns in place: transformers' repetition penalty, OpenAI's frequency and presence ones."""
    at = np.stack([np.repeat([r for r, _ in found], [e.ids.size for _, e in found]), _joined(found, "ids")])
    where = tuple(to_device(at, processed.device))  # [sum(N)] twice
    factor, offset = to_device(np.stack([_joined(found, "factor"), _joined(found, "offset")]), processed.device)
    processed[where] = _edited(processed[where].double(), factor, offset).float()


def _joined(found: list[tuple[int, ColumnEdits]], name: str) -> NDArray:
    return np.concatenate([getattr(edits, name) for _, edits in found])
