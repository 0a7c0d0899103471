"""`decide` in torch, on any device: what comes after every row of a step at once, and one copy to the host.

After a node comes the first draw that is accepted there, else what the target says itself. That follows from the node's
own row and from numbers that are known before, so that all rows of all proposals are computed together: to look at one
after the other would be a wait for each. The host then walks the trees by these tokens. A chain that is decided by
block says in which of its rows the walk ends.

Until that copy the host only queues work: nothing asks a tensor for its values, and what goes up leaves from pinned
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.sampling.acceptance import DrawTable, accept_block, accept_draws
from outrider.engine.sampling.coupled import MAX_NUMBERS, device_keys, picked
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState, process_unchecked, sound_rows
from outrider.engine.sampling.reported import packed, unpacked
from outrider.engine.sampling.row_law import NothingToDraw, RowLaw
from outrider.engine.sampling.sampling import argmax, distributions, probabilities
from outrider.engine.sampling.wire_tensors import scattered
from target_service.proposal import Proposal
from target_service.step_rows import Decided, StepRows, is_block, walk


def decide_on_device(
    proposals: Sequence[Proposal], states: Sequence[SamplingState], logits: Tensor, *, by_block: bool = True
) -> list[Decided | NonFiniteLogits]:
    """Decide each slot, as `decide` does. logits: [sum(K_b + 1), V] float32, slots in order."""
    step = _DeviceStep(proposals, states, logits, by_block=by_block)
    next_ids, has_mass, is_last = step.next_ids()  # [R] int64 each
    parts = [sound_rows(logits), next_ids, has_mass, is_last, step.log_probs(next_ids)]
    values = torch.cat([part.double() for part in parts]).cpu().numpy()  # ids fit a double: the one wait of a step
    num_rows = len(next_ids)
    return step.read(values[: 4 * num_rows].reshape(4, num_rows).astype(np.int64), values[4 * num_rows :])


class _DeviceStep:
    """The proposals of a step whose logits are on a device."""

    def __init__(
        self, proposals: Sequence[Proposal], states: Sequence[SamplingState], logits: Tensor, *, by_block: bool
    ) -> None:
        self._proposals = proposals
        self._logits = logits
        self._device = logits.device
        self._step = step = StepRows.of(proposals)
        self._rows = list[LogitRow]()
        self._greedy_rows = list[int]()
        self._sampled_rows = list[int]()
        self._blocks = list[int]()
        """Proposals that are decided by block."""
        self._reported_rows = list[int]()
        self._max_logprobs = 0
        for b, (proposal, state) in enumerate(zip(proposals, states, strict=True)):
            own = range(step.starts[b], step.starts[b + 1])
            self._rows += [LogitRow(state, proposal.tree.prefix(row - own[0] - 1)) for row in own]
            if state.params.greedy:
                self._greedy_rows += own
            elif by_block and is_block(proposal):
                self._blocks.append(b)
            else:
                self._sampled_rows += own
            num_logprobs = proposal.slot.params.num_logprobs
            if num_logprobs is not None:
                self._reported_rows += own
                self._max_logprobs = max(self._max_logprobs, num_logprobs)
        self._processed = process_unchecked(logits, self._rows)

    def next_ids(self) -> Tensor:
        """Return of each row the token that comes after it, whether there was positive finite mass to draw it from,
        and whether a walk ends there: [3, R] int64.
        """
        order = [*self._greedy_rows]
        parts = list[Tensor]()
        if self._greedy_rows:
            best = self._best_ids()
            parts.append(_outcomes(best, torch.ones_like(best)))
        num_draws = np.bincount(self._step.draw_rows, minlength=len(self._rows))  # [R]
        sampled = sorted(self._sampled_rows, key=num_draws.__getitem__)  # those without draws are decided together
        num_at_once = max(1, MAX_NUMBERS // self._logits.shape[1])
        for first in range(0, len(sampled), num_at_once):
            rows = sampled[first : first + num_at_once]
            parts.append(self._sampled_ids(rows, num_draws[rows]))
            order += rows
        if self._blocks:
            rows, part = self._block_ids()
            parts.append(part)
            order += rows
        return torch.cat(parts, dim=1)[:, to_device(np.argsort(order), self._device)]

    def _best_ids(self) -> Tensor:
        """Return the best tokens after the greedy rows, or drafts that will do with lenience, [N] int64."""
        rows = self._greedy_rows
        processed = self._select(rows)
        best = argmax(processed)
        draft_ids = np.full(len(self._rows), -1)
        log_lenience = np.zeros((len(self._rows), 1))
        for proposal, start in zip(self._proposals, self._step.starts, strict=False):
            if proposal.slot.params.lenience < 1.0:  # of chains alone
                own = slice(start, start + len(proposal.tree))
                draft_ids[own] = proposal.tree.ids
                log_lenience[own] = math.log(proposal.slot.params.lenience)
        if not log_lenience.any():
            return best
        drafts = to_device(draft_ids[rows], self._device)
        least = processed.amax(dim=1, keepdim=True).double() + to_device(log_lenience[rows], self._device)
        is_near = processed.gather(1, drafts.clamp_min(0)[:, None]) >= least  # [N, 1]
        return torch.where((drafts >= 0) & is_near[:, 0], drafts, best)

    def _sampled_ids(self, rows: Sequence[int], num_draws: NDArray[np.int64]) -> Tensor:
        """Return what comes after rows that a token is drawn in, as `next_ids` does. num_draws: after each, [N]."""
        log_probs = distributions(self._select(rows), [self._rows[row] for row in rows])  # [N, V]
        keys = self._keys(rows)
        if not num_draws.any():
            return _outcomes(picked(log_probs, keys), log_probs.amax(dim=1) > -torch.inf)
        accepted_ids, left = accept_draws(self._draw_table(rows, num_draws), probabilities(log_probs))
        total = left.sum(dim=1)
        has_mass = (total > 0) & (total < torch.inf)
        is_accepted = accepted_ids >= 0
        return _outcomes(torch.where(is_accepted, accepted_ids, picked(left.log(), keys)), is_accepted | has_mass)

    def _draw_table(self, rows: Sequence[int], num_draws: NDArray[np.int64]) -> DrawTable:
        step = self._step
        token_ids = np.zeros((len(rows), num_draws.max()), dtype=np.int64)
        uniforms = np.zeros(token_ids.shape)
        drawn_from: list[list[tuple[int, RowLaw]]] = [[] for _ in range(num_draws.max())]
        node_of = {row: node for node, row in enumerate(rows)}
        for draw, row in enumerate(step.draw_rows):
            if row not in node_of:
                continue
            node, place = node_of[row], step.draw_places[draw]
            token_ids[node, place] = step.draw_ids[draw]
            uniforms[node, place] = step.uniforms[draw]
            law = step.distributions[draw]
            if law is not None:
                drawn_from[place].append((node, law))
        lenience = np.array([self._rows[row].state.params.lenience for row in rows])
        return DrawTable(token_ids, uniforms, num_draws, drawn_from, lenience)

    def _block_ids(self) -> tuple[list[int], Tensor]:
        """Return the rows of the chains that are decided by block, and what comes after them as `next_ids` does."""
        step, vocab_size = self._step, self._logits.shape[1]
        draws = [draw for b in self._blocks for draw in range(*step.draw_starts[b : b + 2])]  # [D], a slot's in a row
        counts = np.array([len(self._proposals[b].tree) for b in self._blocks])[:, None]  # [B, 1]
        width = int(counts.max())
        places = np.arange(width + 1)
        is_draft, is_own = places[:width] < counts, places <= counts  # [B, K], [B, K + 1]; the rest is padding
        starts = [step.starts[b] for b in self._blocks]
        # Positions past a slot's own repeat its last one; the rule never looks at them.
        padded_rows = np.array(starts)[:, None] + np.minimum(places, counts)  # [B, K + 1]
        rows = padded_rows[is_own]  # [N], ascending
        draft_ids = np.zeros(padded_rows.shape, dtype=np.int64)
        draft_ids[:, :width][is_draft] = np.array(step.draw_ids)[draws]
        uniforms = np.ones(is_draft.shape)
        uniforms[is_draft] = step.uniforms[draws]
        laws = list[tuple[int, RowLaw]]()
        for cell, draw in zip(np.flatnonzero(is_draft).tolist(), draws, strict=True):
            law = step.distributions[draw]
            assert law is not None, "each draft token of a block is the only one that was drawn there"
            laws.append((cell, law))
        drafts = to_device(draft_ids, self._device)
        target = distributions(self._select(rows), [self._rows[row] for row in rows])  # [N, V]
        outcome = accept_block(
            target[to_device(np.searchsorted(rows, padded_rows), self._device)],
            scattered(laws, is_draft.size, vocab_size, self._device).view(*is_draft.shape, vocab_size),
            drafts[:, :width],
            to_device(counts[:, 0], self._device),
            to_device(uniforms, self._device),
            self._keys(starts),
        )
        is_last = torch.arange(width + 1, device=self._device) == outcome.num_accepted[:, None]  # [B, K + 1]
        ids = torch.where(is_last, outcome.next_ids[:, None], drafts)
        part = _outcomes(ids, outcome.has_mass[:, None].expand_as(ids), is_last).flatten(1)
        return rows.tolist(), part[:, to_device(np.flatnonzero(is_own), self._device)]

    def _select(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Return some rows of the processed logits, [N, V] float32."""
        if np.array_equal(rows, range(len(self._rows))):
            return self._processed
        return self._processed.index_select(0, to_device(np.array(rows), self._device))

    def _keys(self, rows: Sequence[int]) -> Tensor:
        """Return what the target's own numbers of these rows' positions are keyed with, [N, 4] int64."""
        params = [self._rows[row].state.params for row in rows]
        return device_keys(params, [self._step.positions[row] for row in rows], self._device)

    def log_probs(self, next_ids: Tensor) -> Tensor:
        """Return `reported.packed` of all rows of the slots that ask; a row off its slot's path means nothing."""
        if not self._reported_rows:
            return self._logits.new_empty(0)
        rows = to_device(np.array(self._reported_rows), self._device)
        return packed(self._logits[rows], next_ids[rows], self._max_logprobs).view(-1)

    def read(self, outcomes: NDArray[np.int64], log_probs: NDArray[np.float64]) -> list[Decided | NonFiniteLogits]:
        """Walk each tree on the host. outcomes [4, R]: whether a row's logits are finite, and `next_ids`; log_probs: as
        `log_probs`, in one row.

        A slot is decided by the rows on its path, and by all of a block. Raises NothingToDraw where one has no mass.
        """
        is_finite, next_ids, has_mass, is_last = outcomes.tolist()
        reported = log_probs.reshape(len(self._reported_rows), 1 + 2 * self._max_logprobs)
        num_read = 0
        decided = list[Decided | NonFiniteLogits]()
        for b, proposal in enumerate(self._proposals):
            start, end = self._step.starts[b : b + 2]
            by_block = b in self._blocks
            following = [*next_ids[start + 1 : end], next_ids[start]]  # after each node, and ROOT last
            max_accepted = is_last.index(1, start) - start if by_block else None
            found = walk(proposal.tree, following.__getitem__, max_accepted)
            rows = [start, *(start + 1 + node for node in found.path)]
            bad_rows = [row for row in (range(start, end) if by_block else rows) if not is_finite[row]]
            if not bad_rows and not all(has_mass[row] for row in rows):
                raise NothingToDraw("nothing to draw from: a slot's law has no positive finite mass")
            num_logprobs = proposal.slot.params.num_logprobs
            if num_logprobs is not None:
                values = reported[[num_read + row - start for row in rows]]
                found = Decided(found.path, found.next_id, tuple(unpacked(values, num_logprobs)))
                num_read += end - start
            decided.append(NonFiniteLogits(bad_rows) if bad_rows else found)
        return decided


def _outcomes(ids: Tensor, has_mass: Tensor, is_last: Tensor | None = None) -> Tensor:
    """Return ids, [N] or [B, K + 1], as `next_ids` does; walks go on unless said otherwise."""
    return torch.stack((ids, has_mass.long(), torch.zeros_like(ids) if is_last is None else is_last.long()))
