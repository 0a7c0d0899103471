"""From the logits of a step to what is accepted in each slot: every rule runs once over all slots that use it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from outrider.engine.acceptance import Outcome, accept_greedy, accept_rejection
from outrider.engine.noise import Purpose
from outrider.engine.sampling import LogitRow, SamplingState, argmax, distributions, process
from outrider.engine.slot_noise import slot_uniforms
from target_service.waiting import Ready


def decide(ready: Sequence[Ready], states: Sequence[SamplingState], logits: Tensor) -> list[tuple[int, int]]:
    """(num_accepted, next id) per slot. logits: [sum(K_b + 1), V] float32, slots in order.

    Raises NonFiniteLogits.
    """
    rows = [
        LogitRow(state, tuple(r.draft_ids[:j]))
        for r, state in zip(ready, states, strict=True)
        for j in range(len(r.draft_ids) + 1)
    ]
    processed = process(logits, rows)
    offsets = [0, *accumulate(len(r.draft_ids) + 1 for r in ready)]
    outcomes: list[tuple[int, int]] = [(0, 0)] * len(ready)
    for greedy, rule in ((True, _greedy), (False, _sampled)):
        group = [b for b, r in enumerate(ready) if r.slot.params.greedy is greedy]
        if group:
            batch = Batch([ready[b] for b in group], [offsets[b] for b in group], processed.device)
            outcome = rule(batch, processed, rows)
            pairs = zip(outcome.num_accepted.tolist(), outcome.next_ids.tolist(), strict=True)
            for b, pair in zip(group, pairs, strict=True):
                outcomes[b] = pair
    return outcomes


def _greedy(batch: Batch, processed: Tensor, rows: list[LogitRow]) -> Outcome:
    target_ids = argmax(processed)[batch.row_index]  # [B, K+1] int64
    return accept_greedy(target_ids, batch.draft_ids, batch.num_drafted)


def _sampled(batch: Batch, processed: Tensor, rows: list[LogitRow]) -> Outcome:
    used = batch.used_rows()  # rows of sampled slots only
    target = processed.new_full((len(rows), processed.shape[1]), -torch.inf)
    target[used] = distributions(processed[used], [rows[i] for i in used])
    accept_u, recover_u, target_u = batch.uniforms((Purpose.ACCEPT, Purpose.RECOVER, Purpose.TARGET))
    return accept_rejection(
        target[batch.row_index],  # [B, K+1, V]
        batch.draft_log_probs(processed.shape[1]),  # [B, K, V]
        batch.draft_ids,
        batch.num_drafted,
        accept_u[:, :-1],
        recover_u[:, :-1],
        target_u,
    )


class Batch:
    """Slots of one acceptance rule, padded to the widest."""

    def __init__(self, ready: list[Ready], offsets: list[int], device: torch.device) -> None:
        """offsets: the row of the step's logits at which each slot begins."""
        self._ready = ready
        self._device = device
        counts = [len(r.draft_ids) for r in ready]
        width = max(counts)
        self.num_drafted = torch.tensor(counts, device=device)  # [B]
        padded = [[*r.draft_ids, *[0] * (width - len(r.draft_ids))] for r in ready]
        self.draft_ids = torch.tensor(padded, dtype=torch.int64, device=device).view(len(ready), width)  # [B, K]
        # Rows past a slot's own K repeat its last one; the rules never look at them.
        self._rows = [[start + min(j, n) for j in range(width + 1)] for start, n in zip(offsets, counts, strict=True)]
        self.row_index = torch.tensor(self._rows, device=device)  # [B, K+1]

    def used_rows(self) -> list[int]:
        return sorted({row for rows in self._rows for row in rows})

    def draft_log_probs(self, vocab_size: int) -> Tensor:
        """[B, K, V] float32; padding rows are -inf."""
        width = self.draft_ids.shape[1]
        out = torch.full((len(self._ready), width, vocab_size), -torch.inf, device=self._device)
        for b, r in enumerate(self._ready):
            if r.draft_log_probs is not None:
                out[b, : len(r.draft_ids)] = r.draft_log_probs
        return out

    def uniforms(self, purposes: Sequence[Purpose]) -> Tensor:
        """[P, B, K+1] float64, one per purpose and position that may be decided."""
        width = self.draft_ids.shape[1] + 1
        params = [r.slot.params for r in self._ready for _ in range(width)]
        positions = [len(r.slot.committed) + j for r in self._ready for j in range(width)]
        return slot_uniforms(params, positions, purposes, self._device).view(len(purposes), -1, width)
