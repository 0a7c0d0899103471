"""`decide` in torch, on any device: the token after every row of a step at once, and one copy to the host.

The token after a node is the first draw that is accepted there, else the target's own token. It depends only on the
node's row and on numbers that are known beforehand, so the rows of all proposals are computed together; one by one, the
host would wait for each of them. The host then walks the trees by these tokens. If a chain is decided by block, the
device marks the row at which the walk ends.

Before that copy the host only queues work: it reads no tensor's values, and copies to the device leave from pinned
memory. R rows, B slots, K draft tokens of the longest chain, A draws after one node, V ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.acceptance import DrawTable, accept_block, accept_draws
from outrider.engine.sampling.coupled import MAX_NUMBERS, device_keys, pick
from outrider.engine.sampling.device_sampling import argmax, distributions, probabilities
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState, process_unchecked, sound_rows
from outrider.engine.sampling.reported import pack, unpack
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.sampling.wire_tensors import scatter
from outrider.engine.speculation.draft_tree import ROOT
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal
from target_service.step.step_rows import Decided, StepRows, is_block, walk


def decide_on_device(
    proposals: Sequence[Proposal], states: Sequence[SamplingState], logits: Tensor
) -> list[Decided | NonFiniteLogits]:
    """Return the decision on each proposal, in order, computed on the device of `logits`. If the logits of a slot are
    NaN or infinite, its decision is NonFiniteLogits.

    logits: [R, V] float32: for each slot in order, the row after its last committed token, then one row for each node
    of its tree.
    """
    step = _DeviceStep(proposals, states, logits)
    step.decide_rows()
    return step.read()


class _DeviceStep:
    """Proposals of a step whose logits are on a device."""

    def __init__(self, proposals: Sequence[Proposal], states: Sequence[SamplingState], logits: Tensor) -> None:
        self._proposals = proposals
        self._logits = logits
        self._device = logits.device
        self._step = step = StepRows(proposals)
        self._rows = list[LogitRow]()
        self._greedy_rows = list[int]()
        self._sampled_rows = list[int]()
        self._blocks = list[int]()
        """Indices of the proposals that block verification decides."""
        self._reported_rows = list[int]()
        self._max_logprobs = 0
        for b, (proposal, state) in enumerate(zip(proposals, states, strict=True)):
            own = range(step.starts[b], step.starts[b + 1])
            for node in range(ROOT, len(proposal.tree)):
                self._rows.append(LogitRow(state, proposal.tree.prefix(node)))
            if state.params.greedy:
                self._greedy_rows += own
            elif is_block(proposal):
                self._blocks.append(b)
            else:
                self._sampled_rows += own
            num_logprobs = proposal.slot.params.num_logprobs
            if num_logprobs is not None:
                self._reported_rows += own
                self._max_logprobs = max(self._max_logprobs, num_logprobs)
        self._processed = process_unchecked(logits, self._rows)  # [R, V] float32
        self._next_ids = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
        """Token after each row, [R] int64."""
        self._num_accepted = self._next_ids[:0]
        """Number of draft tokens that each block accepts, [B] int64."""
        # draw_rows [1, 1, 4], draw_indices [0, 1, 0]: two draws after row 1 and one after row 4, A = 2
        draws = (step.draw_rows, step.draw_indices)
        self._draw_ids = np.zeros((len(logits), max(step.draw_indices, default=-1) + 1), dtype=np.int64)
        """Token of each draw after a row, [R, A]."""
        self._draw_ids[draws] = step.draw_ids
        self._uniforms = np.zeros(self._draw_ids.shape)
        """Number by which each draw is accepted, [R, A]."""
        self._uniforms[draws] = step.uniforms
        self._drawn_from: dict[tuple[int, int], TokenDistribution | None] = {}
        """Distribution of each draw, by row and place."""
        for row, place, distribution in zip(step.draw_rows, step.draw_indices, step.distributions, strict=True):
            self._drawn_from[row, place] = distribution

    def decide_rows(self) -> None:
        """Queue the computation of the tokens after all rows."""
        if self._greedy_rows:
            self._decide_greedy()
        num_draws = np.bincount(self._step.draw_rows, minlength=len(self._rows))  # [R]
        sampled = sorted(self._sampled_rows, key=num_draws.__getitem__)  # those without draws are decided together
        num_at_once = max(1, MAX_NUMBERS // self._logits.shape[1])
        for first in range(0, len(sampled), num_at_once):
            rows = sampled[first : first + num_at_once]
            self._decide_sampled(rows, num_draws[rows])
        if self._blocks:
            self._decide_blocks()

    def _decide_greedy(self) -> None:
        self._next_ids[self._up(self._greedy_rows)] = argmax(self._select(self._greedy_rows))  # [N]
        rows = list[int]()
        draft_ids = list[int]()
        log_lenience = list[float]()
        for proposal, start in zip(self._proposals, self._step.starts, strict=False):
            params = proposal.slot.params
            tree = proposal.tree
            if params.greedy and params.lenience < 1.0:  # of chains alone
                rows += range(start, start + len(tree))
                draft_ids += tree.ids
                log_lenience += [math.log(params.lenience)] * len(tree)
        if not rows:
            return
        at = self._up(rows)  # [N]
        drafts = self._up(draft_ids)  # [N]
        processed = self._select(rows)  # [N, V]
        min_logits = processed.amax(dim=1).double() + self._up(log_lenience)  # [N] float64
        is_near = processed.gather(1, drafts[:, None])[:, 0] >= min_logits  # [N]
        self._next_ids[at] = torch.where(is_near, drafts, self._next_ids[at])

    def _decide_sampled(self, rows: Sequence[int], num_draws: NDArray[np.int64]) -> None:
        own = [self._rows[row] for row in rows]
        log_probs = distributions(self._select(rows), own)  # [N, V] float32
        keys = self._keys(rows)  # [N, 4]
        if num_draws.any():
            num_places = num_draws.max()
            draws = DrawTable(
                self._draw_ids[rows, :num_places],
                self._uniforms[rows, :num_places],
                num_draws,
                [self._distributions(rows, place) for place in range(num_places)],
                np.array([row.state.params.lenience for row in own]),
            )
            accepted_ids, left = accept_draws(draws, probabilities(log_probs))  # [N], [N, V] float64
            next_ids = torch.where(accepted_ids >= 0, accepted_ids, pick(left.log(), keys))  # [N]
        else:
            next_ids = pick(log_probs, keys)  # [N]
        self._next_ids[self._up(rows)] = next_ids

    def _decide_blocks(self) -> None:
        # first rows [5, 9], K [3, 1]: padded rows [[5, 6, 7, 8], [9, 10, 10, 10]], draft rows [[5, 6, 7], [9, 10, 10]]
        starts = np.array(self._step.starts)  # [all proposals + 1]
        vocab_size = self._logits.shape[1]
        firsts = starts[self._blocks]  # [B]
        counts = starts[1:][self._blocks] - firsts - 1  # [B]
        # Positions past a slot's own repeat its last one: the rule never looks at them.
        places = np.minimum(np.arange(counts.max() + 1), counts[:, None])  # [B, K + 1]
        padded_rows = firsts[:, None] + places  # [B, K + 1]
        draft_rows = padded_rows[:, :-1]  # [B, K]
        rows = np.unique(padded_rows)  # [N]
        target = distributions(self._select(rows), [self._rows[row] for row in rows])  # [N, V]
        drawn_from = self._distributions(draft_rows.ravel().tolist(), 0)
        drafts = self._up(self._draw_ids[padded_rows, 0])  # [B, K + 1]
        draft = scatter(drawn_from, draft_rows.size, vocab_size, self._device)  # [B * K, V]
        outcome = accept_block(
            target[self._up(np.searchsorted(rows, padded_rows))],  # [B, K + 1, V]
            draft.view(*draft_rows.shape, vocab_size),  # [B, K, V]
            drafts[:, :-1],  # [B, K]
            self._up(counts),  # [B]
            self._up(self._uniforms[draft_rows, 0]),  # [B, K]
            self._keys(firsts),  # [B, 4]
        )
        self._num_accepted = outcome.num_accepted
        is_last = self._up(places) == outcome.num_accepted[:, None]  # [B, K + 1]
        self._next_ids[self._up(padded_rows)] = torch.where(is_last, outcome.next_ids[:, None], drafts)

    def _distributions(self, rows: Iterable[int], place: int) -> list[tuple[int, TokenDistribution]]:
        found = list[tuple[int, TokenDistribution]]()
        for index, row in enumerate(rows):
            distribution = self._drawn_from.get((row, place))
            if distribution is not None:
                found.append((index, distribution))
        return found

    def _select(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        if np.array_equal(rows, range(len(self._rows))):
            return self._processed
        return self._processed.index_select(0, self._up(rows))  # [N, V] float32

    def _keys(self, rows: Iterable[int]) -> Tensor:
        params = list[SamplingParams]()
        positions = list[int]()
        for row in rows:
            params.append(self._rows[row].state.params)
            positions.append(self._step.positions[row])
        return device_keys(params, positions, self._device)  # [N, 4] int64

    def _up(self, values: Sequence[float] | NDArray[Any]) -> Tensor:
        return to_device(np.array(values), self._device)

    def _log_probs(self) -> Tensor:
        if not self._reported_rows:
            return self._logits.new_empty(0)
        rows = self._up(self._reported_rows)  # [N]: all rows of the slots that report; those off a path mean nothing
        return pack(self._logits[rows], self._next_ids[rows], self._max_logprobs).view(-1)  # [N * (1 + 2 max)]

    def read(self) -> list[Decided | NonFiniteLogits]:
        """Copy the tokens after all rows to the host, walk each tree there, and return the decisions.

        A slot's decision is NonFiniteLogits only if a row on its accepted path, or any row of a slot that is decided by
        block verification, is NaN or infinite.
        """
        parts = [sound_rows(self._logits), self._next_ids, self._num_accepted, self._log_probs()]
        values = torch.cat([part.double() for part in parts]).cpu()  # ids fit a double: the one wait of a step
        finite, ids, counts, log_probs = values.split([len(part) for part in parts])
        is_finite: list[int] = finite.long().tolist()
        next_ids: list[int] = ids.long().tolist()
        num_accepted_by_block = dict(zip(self._blocks, counts.long().tolist(), strict=True))
        reported = log_probs.view(-1, 1 + 2 * self._max_logprobs).numpy()
        decided = list[Decided | NonFiniteLogits]()
        for b, proposal in enumerate(self._proposals):
            start, end = self._step.starts[b : b + 2]
            if b in num_accepted_by_block:
                num = num_accepted_by_block[b]
                found = Decided(tuple(range(num)), next_ids[start + num])
                read_rows = list(range(start, end))
            else:
                following = [*next_ids[start + 1 : end], next_ids[start]]  # after each node, and ROOT last
                found = walk(proposal.tree, following.__getitem__)
                read_rows = found.rows(start)
            bad_rows = [row for row in read_rows if not is_finite[row]]
            num_logprobs = proposal.slot.params.num_logprobs
            if bad_rows:
                decided.append(NonFiniteLogits(bad_rows))
            elif num_logprobs is None:
                decided.append(found)
            else:
                first = self._reported_rows.index(start)
                own = reported[found.rows(first)]
                decided.append(replace(found, reported=tuple(unpack(own, num_logprobs))))
        return decided
