"""Change logits by a request's grammar, penalties, logit bias and bans, before temperature and cuts.

Order: grammar, repetition penalty (over prompt and output), frequency and presence penalty (over the output), logit
bias, bad words, minimum length. Draft tokens before a row's position count as output. Without a grammar, only columns
of penalised, biased or banned ids are changed. The grammar always wins: bans apply to the ids that it allows, and are
lifted where they would leave none of these.

vLLM differs in two points: it adds the logit bias before the penalties, so that its repetition penalty scales the
biased logit, and it looks for the beginning of a bad word in the output alone.

`process_unchecked` serves a batch on any device, `process_row` one row on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.column_edits import ColumnEdits, Columns
from outrider.engine.sampling.grammar_state import Grammar, GrammarState, Mask, MaskBits
from outrider.engine.sampling.token_distribution import Array, Ids, Scores
from outrider.wire.errors import WorkerFault
from outrider.wire.requests.params import SamplingParams

_FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class NonFiniteLogits(WorkerFault):
    """Raised if a model returned NaN or an infinity, so that nothing can be drawn."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the model returned NaN or infinite logits in rows {list(rows)} of the batch; "
            "its weights are damaged or its dtype overflows (float16 often does: use bfloat16 or float32)"
        )
        self.rows = tuple(rows)
        """Indices of the rows with NaN or infinite logits among the logits that the step returned."""


class SamplingState:
    """Penalties, bans and grammar of one slot after its committed output. The output is stored only if the penalties or
    bans depend on it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Create the state of a slot without output. grammar: the request's compiled grammar; None if the request has
        none, or in a draft worker that cannot follow it.
        """
        self.params = params
        self._output: list[int] = []
        self._num_output = 0
        one_token_words = set[int]()
        self._last_ids: dict[tuple[int, ...], list[int]] = {}
        """Ids that complete a bad word, by the other ids of the word."""
        for word in params.bad_words:
            if len(word) == 1:
                one_token_words.add(word[0])
            elif len(word) > 1:
                self._last_ids.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._banned = frozenset(one_token_words)
        self._begin_lens = sorted({len(beginning) for beginning in self._last_ids})
        self._context_len = max(self._begin_lens, default=0)
        self._prompt_tail = tuple(prompt_ids[max(0, len(prompt_ids) - self._context_len) :])
        self._early_banned = frozenset[int]()
        """Ids that end an output; they are banned until the output has min_tokens."""
        if params.min_tokens:
            self._early_banned = frozenset(params.stop_token_ids)
            if not params.ignore_eos:
                self._early_banned |= frozenset(eos_token_ids)
        self._columns: Columns | None = None
        if _is_penalised(params):
            self._columns = Columns(params, prompt_ids)
        self._grammar: GrammarState | None = None
        if grammar is not None:
            self._grammar = GrammarState(grammar)
        has_bans = bool(params.bad_words or self._early_banned)
        self.plain = self._columns is None and self._grammar is None and not has_bans
        """Whether the request has no penalty, bias, ban or grammar, so that its logits are never changed."""

    @property
    def num_output(self) -> int:
        """Number of committed output tokens at the last call of `set_output`."""
        return self._num_output

    def set_output(self, ids: Sequence[int]) -> None:
        """Set the committed output to `ids`. The call is fast if `ids` begin with the previous output."""
        self._num_output = len(ids)
        if self._grammar is not None:
            self._grammar.set_output(ids)
        if self._columns is None and not self._last_ids:
            return
        known = len(self._output)
        if self._output != list(ids[:known]):
            if self._columns is not None:
                self._columns.forget_output()
            self._output = []
            known = 0
        new = ids[known:]
        self._output.extend(new)
        if self._columns is not None:
            self._columns.add_output(new)

    def edits(self, draft_prefix: tuple[int, ...]) -> ColumnEdits | None:
        """Return the edits by penalties and biases at the position after the output and the draft tokens
        `draft_prefix`; None if there are none.
        """
        if self._columns is None:
            return None
        return self._columns.after(draft_prefix)

    def allowed(self, draft_prefix: tuple[int, ...]) -> Mask | None:
        """Return for each id whether the grammar allows it after the output and the draft tokens `draft_prefix`, [V];
        None if all are allowed.

        It is also None if the grammar does not allow `draft_prefix` itself: the last token of the prefix has
        probability 0, so no decision depends on the position after it.
        """
        if self._grammar is None:
            return None
        return self._grammar.allowed(draft_prefix)

    def allowed_bits(self, draft_prefix: tuple[int, ...]) -> MaskBits | None:
        """Return for each id whether the grammar allows it after the output and the draft tokens `draft_prefix`, one
        bit per id (`MaskBits`). Return None if all are allowed, or if the grammar does not allow `draft_prefix` itself.
        """
        if self._grammar is None:
            return None
        return self._grammar.allowed_bits(draft_prefix)

    def failure(self, draft_prefix: tuple[int, ...]) -> str | None:
        """Return why the grammar cannot be followed beyond the output and the draft tokens `draft_prefix`; None if it
        can, or if there is no grammar.
        """
        if self._grammar is None:
            return None
        return self._grammar.failure(draft_prefix)

    def forced(self) -> list[int]:
        """Return the ids that the grammar forces after the output; empty if it leaves a choice, or if there is no
        grammar.
        """
        if self._grammar is None:
            return []
        return self._grammar.forced()

    def banned(self, draft_prefix: tuple[int, ...], vocab_size: int) -> frozenset[int]:
        """Return the ids that are banned after the output and the draft tokens `draft_prefix`, among those that the
        grammar allows.

        The last id of a bad word is banned if its other ids end the sequence of prompt, output and `draft_prefix`: a
        bad word is never completed in the output, even if it begins in the prompt. Bans that would leave no id of the
        vocabulary, or of those that the grammar allows, are lifted at that position.

            bad word [4, 5, 6], output [.., 4], draft_prefix (5,): {6}
        """
        banned = self._banned
        if self._last_ids:
            context = self._context(draft_prefix)
            for size in self._begin_lens:
                banned = banned.union(self._last_ids.get(context[-size:], ()))
        if self._num_output + len(draft_prefix) < self.params.min_tokens:
            banned = banned | self._early_banned
        if not banned:
            return banned
        allowed = self.allowed(draft_prefix)
        num_allowed = vocab_size
        if allowed is not None:
            num_allowed = int(allowed.sum())
        kept = set[int]()
        for token_id in banned:
            # A model may have an end of sequence beyond its vocabulary, which it cannot emit.
            if token_id < vocab_size and (allowed is None or allowed[token_id]):
                kept.add(token_id)
        if len(kept) >= num_allowed:
            return frozenset()
        return frozenset(kept)

    def _context(self, draft_prefix: tuple[int, ...]) -> tuple[int, ...]:
        tail = self._output[max(0, len(self._output) - self._context_len) :]
        return (*self._prompt_tail, *tail, *draft_prefix)


@dataclass(frozen=True, slots=True)
class LogitRow:
    """Slot and position of a row of logits: after the slot's committed tokens and the draft tokens `draft_prefix`."""

    state: SamplingState
    draft_prefix: tuple[int, ...] = ()
    """Draft tokens between the committed tokens and the row's position."""


def _is_penalised(params: SamplingParams) -> bool:
    is_off = params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
    return not is_off or bool(params.logit_bias)


def sound_rows(logits: Tensor) -> Tensor:
    """Return for each row whether all its logits are finite: [R, V] -> [R] bool."""
    low, high = logits.aminmax(dim=1)  # [R] each
    return (low > -torch.inf) & (high < torch.inf)  # a NaN anywhere makes both NaN


def process_unchecked(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """Return the logits after each row's grammar, penalties, biases and bans: [R, V] float32 -> [R, V] float32, -inf
    where banned.

    rows: request and position of each row, [R]. `logits` itself stays as it is, for reported log-probs; it is returned
    if no row changes. A row of finite logits keeps at least one finite logit. Whether logits are finite is not checked:
    the check would make the host wait for the device.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests' rows")
    edits = list[tuple[int, ColumnEdits]]()
    bans = list[tuple[int, int]]()  # (row, id)
    masked_rows = list[int]()
    masks = list[MaskBits]()
    vocab_size = logits.shape[1]
    for r, row in enumerate(rows):
        state = row.state
        if state.plain:
            continue
        own_edits = state.edits(row.draft_prefix)
        if own_edits is not None:
            edits.append((r, own_edits))
        for token_id in state.banned(row.draft_prefix, vocab_size):
            bans.append((r, token_id))
        bits = state.allowed_bits(row.draft_prefix)
        if bits is not None:
            masked_rows.append(r)
            masks.append(bits)
    if not edits and not bans and not masks:
        return logits
    processed = logits.clone()  # [R, V]
    if edits:
        _penalise(processed, edits)
    if bans:
        cells = to_device(np.array(bans, dtype=np.int64).T.copy(), processed.device)  # [2, N] int64
        lowest = processed.new_full((), -torch.inf)  # a number of the host would be copied with a wait
        processed.index_put_((cells[0], cells[1]), lowest)
    if masks:
        masked = to_device(np.array(masked_rows), processed.device)  # [M]
        banned = _is_clear(to_device(np.stack(masks), processed.device), processed.shape[1])  # [M, V] bool
        processed[masked] = processed[masked].masked_fill(banned, -torch.inf)
    return processed


def _is_clear(bits: Tensor, num_ids: int) -> Tensor:
    # masks as `MaskBits` [M, B] uint8 -> [M, num_ids] bool
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)  # [8]
    single_bits = bits[:, :, None] >> places & 1  # [M, B, 8]
    return single_bits.flatten(1)[:, :num_ids] == 0


def process_row(logits: Scores, row: LogitRow, ids: Ids | None = None, vocab_size: int | None = None) -> Scores:
    """Return one row's logits on the host after its grammar, penalties, biases and bans: [N] float32 -> [N] float32,
    -inf where banned.

    ids: token ids of the logits, ascending, [N]; None if the row has all ids. With ids, all logits may become -inf. If
    nothing changes, the same array is returned. vocab_size: number of ids of the vocabulary; by default the number of
    logits.
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
        if ids is not None:
            allowed = allowed[ids]
        processed[~allowed] = -np.inf
    return processed


def _places(ids: Ids | None, named: Ids) -> tuple[Ids, Any]:
    # ids [2, 4, 7], named [4, 5, 7]: places [1, 2] among ids, and the index [yes, no, yes] of those of `named`
    if ids is None:
        return named, slice(None)
    places = np.minimum(np.searchsorted(ids, named), ids.size - 1)
    is_found = ids[places] == named
    return places[is_found], is_found


def _edited(x: Array, factor: Array, offset: Array) -> Array:
    # all [N] float64, of NumPy or torch: in float32 a tiny penalty might divide by zero
    where: Any = np.where
    if isinstance(x, Tensor):
        where = torch.where
    with np.errstate(over="ignore"):
        edited: Array = where(x < 0, x * factor, x / factor) + offset
    return edited.clip(-_FLOAT32_MAX, _FLOAT32_MAX)


def _penalise(processed: Tensor, edits: list[tuple[int, ColumnEdits]]) -> None:
    """Change the named columns in place: transformers' repetition penalty, OpenAI's frequency and presence ones."""
    rows = list[int]()
    sizes = list[int]()
    ids = list[NDArray[np.int64]]()
    factors = list[NDArray[np.float64]]()
    offsets = list[NDArray[np.float64]]()
    for row, own in edits:
        rows.append(row)
        sizes.append(own.ids.size)
        ids.append(own.ids)
        factors.append(own.factor)
        offsets.append(own.offset)
    at = np.stack([np.repeat(rows, sizes), np.concatenate(ids)])  # [2, N]
    where = tuple(to_device(at, processed.device))  # [N] twice
    changes = np.stack([np.concatenate(factors), np.concatenate(offsets)])  # [2, N]
    factor, offset = to_device(changes, processed.device)  # [N] each
    processed[where] = _edited(processed[where].double(), factor, offset).float()
