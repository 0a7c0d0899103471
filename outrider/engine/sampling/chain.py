"""From what a drafter without a model says to a proposal: a chain of ids, and the laws they were drawn from.

Called by the target for its own drafts and by a draft service without a model. Counts take the place of a model's
logits: penalties, biases, bans, temperature and cuts are applied to their logarithms as they are to those, so that
guesses lean the way that the target's tokens do. Whatever comes of it is the law that is drawn from, and handed on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.drafting.drafter import Counts, Walk
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.host_sampling import law_of
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_row
from outrider.engine.sampling.row_law import RowLaw, truncate_topk
from outrider.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Chain:
    """A proposal without a model."""

    ids: list[int]
    laws: list[RowLaw] | None
    """The law that each of ids was drawn from; None where ids are guesses of what the target says, and no law matters.
    """

    @property
    def is_guessed(self) -> bool:
        """Whether no id was drawn by chance: each is all there is of its law."""
        return bool(self.laws) and all(law.scores.size == 1 for law in self.laws or ())


def draw_chain(
    walk: Walk,
    state: SamplingState,
    committed_len: int,
    num_draft_tokens: int,
    vocab_size: int,
    topk: int | None = None,
) -> Chain:
    """Draw at most num_draft_tokens, fewer where there is nothing more to say. Whether it ends depends on the tokens
    before alone, and never on one not drafted: every acceptance rule stays exact.

    state: of the sequence of committed_len tokens that the walk begins behind. topk: laws are cut to so many ids.
    """
    params, ids, laws = state.params, list[int](), list[RowLaw]()
    uniforms: Sequence[float] | None = None
    while len(ids) < num_draft_tokens:
        counts = walk.next()
        law = None if counts is None else law_of_counts(counts, LogitRow(state, tuple(ids)), vocab_size)
        if law is None:
            break
        if not params.determined:
            law = (law if topk is None else truncate_topk(law, topk)).normalised()
            laws.append(law)
        if law.scores.size == 1:  # as under greedy, and mostly where something is copied: no noise is needed
            token_id = law.id_of(0)
        elif params.determined:
            token_id = coupled_id(law, params, committed_len + len(ids))
        else:
            uniforms = _uniforms(params, committed_len, num_draft_tokens) if uniforms is None else uniforms
            token_id = law.draw(uniforms[len(ids)])
        ids.append(token_id)
        walk.step(token_id)
    return Chain(ids, None if params.determined else laws)


def law_of_counts(counts: Counts, row: LogitRow, vocab_size: int) -> RowLaw | None:
    """Return the law of counts under a row's parameters, None where all that was counted is banned."""
    ids, numbers = counts
    if ids.size == 1:  # what is done to the logit of one leaves it all there is
        banned = not row.state.plain and int(ids[0]) in row.state.banned(row.draft_prefix, vocab_size)
        return None if banned else RowLaw(vocab_size, np.zeros(1, dtype=np.float32), ids)
    shares = np.log(numbers / numbers.sum()).astype(np.float32)
    processed = process_row(shares, row, ids, vocab_size)
    if processed.max() == -math.inf:
        return None
    law = law_of(processed, row.state.params)
    return RowLaw(vocab_size, law.scores, ids if law.ids is None else ids[law.ids])


def _uniforms(params: SamplingParams, committed_len: int, count: int) -> Sequence[float]:
    """Return numbers for the positions of a round that begins behind committed_len tokens."""
    positions = range(committed_len, committed_len + count)
    return host_slot_uniforms([params] * count, [committed_len] * count, positions, [Purpose.DRAFT])[0].tolist()
