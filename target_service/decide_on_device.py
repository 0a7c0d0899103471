"""`decide` in torch, on any device: every rule once over all slots that use it, and one copy to the host.

Until that copy the host only queues work: nothing asks a tensor for its values, and what goes up leaves from pinned
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.sampling.acceptance import Accepted, accept_block, accept_matching, accept_token
from outrider.engine.sampling.coupled import coupled_ids, device_keys
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState, process_unchecked, sound_rows
from outrider.engine.sampling.reported import Reported, packed, unpacked
from outrider.engine.sampling.row_law import NothingToDraw
from outrider.engine.sampling.sampling import argmax, distributions
from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree, TreeWalk, walk_matching
from outrider.engine.sampling.wire_tensors import scattered
from outrider.wire.params import SamplingParams
from target_service.lease import Ready
from target_service.trees_on_device import next_ids, node_rows


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision on one slot."""

    num_accepted: int
    next_id: int
    reported: Sequence[Reported] = ()
    """What is reported of the accepted tokens and the next one, when the request asks for it."""
    path: tuple[int, ...] = ()
    """The nodes of a tree that were accepted."""


Rule = Callable[["Batch", Tensor, list[LogitRow]], Accepted]
"""Decides slots of one rule from (these, the step's processed logits [R, V], its rows)."""


def decide_on_device(
    ready: Sequence[Ready], states: Sequence[SamplingState], logits: Tensor, *, by_block: bool = True
) -> list[Decided]:
    """Decide each slot. logits: [sum(K_b + 1), V] float32, slots in order. Raises NonFiniteLogits."""
    rows = [row for r, state in zip(ready, states, strict=True) for row in _rows_of(r, state)]
    processed = process_unchecked(logits, rows)
    starts = list(accumulate((len(r.draft_ids) + 1 for r in ready), initial=0))
    chains = [b for b, r in enumerate(ready) if r.tree is None]
    trees = [(r, r.tree, start) for r, start in zip(ready, starts, strict=False) if r.tree is not None]
    decided = _decided_chains([ready[b] for b in chains], [starts[b] for b in chains], processed, rows, by_block)
    nodes = node_rows([(r, tree) for r, tree, _ in trees], [start for *_, start in trees])
    following = next_ids(nodes, processed, rows)
    asked = _asked_log_probs(ready, starts, decided, following.ids, logits)  # [N, 1 + 2 n] float64
    parts = [~sound_rows(logits), decided.view(-1), asked.view(-1)]
    if nodes:
        parts += [following.ids, following.sound]
    values = torch.cat([part.double() for part in parts]).cpu().numpy()  # ids fit a double: the one wait of a step
    found = np.split(values, np.cumsum([part.numel() for part in parts[:-1]]))
    bad, outcomes, asked_values = found[:3]
    next_of, has_next = found[3:] or (np.empty(0), np.empty(0))
    walks = _walks([tree for _, tree, _ in trees], next_of.astype(int).tolist())
    _check_rows(ready, starts, walks, bad.astype(bool), outcomes.reshape(-1, 3), has_next.astype(bool))
    return _unpacked(ready, outcomes.reshape(-1, 3), walks, asked_values.reshape(asked.shape))


def _rows_of(ready: Ready, state: SamplingState) -> list[LogitRow]:
    if ready.tree is not None:
        return [LogitRow(state, ready.tree.prefix(node)) for node in range(ROOT, len(ready.tree.ids))]
    return [LogitRow(state, tuple(ready.draft_ids[:j])) for j in range(len(ready.draft_ids) + 1)]


def _decided_chains(
    ready: Sequence[Ready], starts: Sequence[int], processed: Tensor, rows: list[LogitRow], by_block: bool
) -> Tensor:
    """Return what is decided of slots whose proposals are chains, [B, 3] int64: how many drafts are accepted, what
    comes next and whether it could be drawn.
    """
    outcomes: list[Tensor] = []
    order: list[int] = []
    rules = [_rule_of(r, by_block) for r in ready]
    for rule in (_greedy, _coupled, _by_block, _by_token):
        group = [b for b, own in enumerate(rules) if own is rule]
        if group:
            batch = Batch([ready[b] for b in group], [starts[b] for b in group], processed.device)
            outcome = rule(batch, processed, rows)
            outcomes.append(torch.stack((outcome.num_accepted, outcome.next_ids, outcome.sound.long()), dim=1))
            order.extend(group)
    if not outcomes:
        return torch.empty((0, 3), dtype=torch.int64, device=processed.device)
    return torch.cat(outcomes)[to_device(np.argsort(order), processed.device)]


def _asked_log_probs(
    ready: Sequence[Ready], starts: Sequence[int], decided: Tensor, following: Tensor, logits: Tensor
) -> Tensor:
    """Return `reported.packed` of all rows of the slots that ask, in order; rows past a slot's next token, or off its
    path, mean nothing. decided, following: of the chains and of the rows of trees.
    """
    nums_best = [r.slot.params.num_logprobs for r in ready if r.slot.params.num_logprobs is not None]
    if not nums_best:
        return logits.new_empty((0, 1), dtype=torch.float64)
    chain_places = list[tuple[int, ...]]()
    tree_places = list[tuple[int, ...]]()
    num_asked = 0
    num_chains = 0
    num_tree_rows = 0
    for r, start in zip(ready, starts, strict=False):
        num_rows = len(r.draft_ids) + 1
        if r.slot.params.num_logprobs is not None:
            drafts = [*r.draft_ids, 0]
            for j in range(num_rows):
                if r.tree is None:
                    chain_places.append((num_asked + j, start + j, num_chains, j, drafts[j]))
                else:
                    tree_places.append((num_asked + j, start + j, num_tree_rows + j))
            num_asked += num_rows
        if r.tree is None:
            num_chains += 1
        else:
            num_tree_rows += num_rows
    order = list[Tensor]()
    chosen = list[Tensor]()
    if chain_places:
        at, rows, slots, js, draft_ids = to_device(np.array(chain_places).T.copy(), logits.device)  # [Nc] int64 each
        order.append(torch.stack((at, rows)))
        chosen.append(torch.where(js == decided[slots, 0], decided[slots, 1], draft_ids))
    if tree_places:
        at, rows, places = to_device(np.array(tree_places).T.copy(), logits.device)  # [Nt] int64 each
        order.append(torch.stack((at, rows)))
        chosen.append(following[places])
    at, rows = torch.cat(order, dim=1)
    found = packed(logits[rows], torch.cat(chosen), max(nums_best))
    return torch.empty_like(found).index_copy_(0, at, found)


def _walks(trees: Sequence[DraftTree], next_of: Sequence[int]) -> list[TreeWalk]:
    """Walk each tree by what comes after its root and after each of its nodes. next_of: of all, in order."""
    found = list[TreeWalk]()
    start = 0
    for tree in trees:
        num_rows = len(tree.ids) + 1
        found.append(_walk(tree, next_of[start : start + num_rows]))
        start += num_rows
    return found


def _walk(tree: DraftTree, next_of: Sequence[int]) -> TreeWalk:
    return walk_matching(tree, lambda node: next_of[1 + node])


def _check_rows(
    ready: Sequence[Ready],
    starts: Sequence[int],
    walks: Sequence[TreeWalk],
    bad: NDArray[np.bool_],
    outcomes: NDArray[np.float64],
    has_next: NDArray[np.bool_],
) -> None:
    """Raise NonFiniteLogits, or NothingToDraw, for the rows that something is decided by: those of a chain, and of a
    tree those on its path. bad [R]; outcomes [B, 3] of the chains; has_next: of the rows of trees.
    """
    bad_rows = list[int]()
    walk_of = iter(walks)
    num_tree_rows = 0
    can_draw = bool(outcomes[:, 2].all())
    for r, start in zip(ready, starts, strict=False):
        num_rows = len(r.draft_ids) + 1
        used = list(range(num_rows))
        if r.tree is not None:
            used = [0, *(1 + node for node in next(walk_of).path)]
            can_draw = can_draw and all(has_next[num_tree_rows + row] for row in used)
            num_tree_rows += num_rows
        bad_rows += [start + row for row in used if bad[start + row]]
    if bad_rows:
        raise NonFiniteLogits(bad_rows)
    if not can_draw:
        raise NothingToDraw("nothing to draw from: a slot's law has no positive finite mass")


def _unpacked(
    ready: Sequence[Ready], outcomes: NDArray[np.float64], walks: Sequence[TreeWalk], asked: NDArray[np.float64]
) -> list[Decided]:
    """Read the decisions on the host. outcomes [B, 3]: of the chains; walks: of the trees; asked: `packed` rows of the
    slots that ask.
    """
    chain_outcomes = iter(outcomes[:, :2].astype(int).tolist())
    walk_of = iter(walks)
    decided = list[Decided]()
    start = 0
    for r in ready:
        path: tuple[int, ...] = ()
        if r.tree is None:
            num_accepted, next_id = next(chain_outcomes)
            used = range(num_accepted + 1)
        else:
            walk = next(walk_of)
            path = walk.path
            num_accepted = len(path)
            next_id = walk.next_id
            used = [0, *(1 + node for node in path)]
        num_logprobs, reported = r.slot.params.num_logprobs, list[Reported]()
        if num_logprobs is not None:
            reported = unpacked(asked[[start + row for row in used]], num_logprobs)
            start += len(r.draft_ids) + 1
        decided.append(Decided(num_accepted, next_id, tuple(reported), path))
    return decided


def _rule_of(ready: Ready, by_block: bool) -> Rule:
    params = ready.slot.params
    if params.greedy:
        return _greedy
    if ready.is_walked:
        return _coupled
    return _by_block if by_block and params.lenience == 1.0 else _by_token


def _greedy(batch: Batch, processed: Tensor, rows: list[LogitRow]) -> Accepted:
    index = batch.row_index()
    target_ids = argmax(processed)[index]  # [B, K+1] int64
    if batch.is_lenient:  # a draft with `lenience` times the best one's probability will do
        best = processed.amax(dim=1)[index[:, :-1]].double() + batch.lenience().log()[:, None]  # [B, K]
        near = (processed[index[:, :-1], batch.draft_ids] >= best) & batch.is_draft()
        target_ids = torch.cat((torch.where(near, batch.draft_ids, target_ids[:, :-1]), target_ids[:, -1:]), dim=1)
    return accept_matching(target_ids, batch.draft_ids, batch.num_drafted)


def _coupled(batch: Batch, processed: Tensor, rows: list[LogitRow]) -> Accepted:
    used = batch.used_rows()
    keys = batch.keys_of_used_rows()
    target_ids = coupled_ids(_laws(processed, rows, used), *keys)[batch.row_index(used)]  # [B, K+1] int64
    return accept_matching(target_ids, batch.draft_ids, batch.num_drafted)


def _laws(processed: Tensor, rows: list[LogitRow], used: list[int]) -> Tensor:
    """[U, V] float32 log-probs of some of the step's rows."""
    if len(used) < len(rows):
        processed = processed.index_select(0, to_device(np.array(used), processed.device))
    return distributions(processed, [rows[i] for i in used])


def _by_block(batch: Batch, processed: Tensor, rows: list[LogitRow]) -> Accepted:
    return accept_block(*_sampled(batch, processed, rows))


def _by_token(batch: Batch, processed: Tensor, rows: list[LogitRow]) -> Accepted:
    return accept_token(*_sampled(batch, processed, rows), batch.lenience())


def _sampled(batch: Batch, processed: Tensor, rows: list[LogitRow]) -> tuple[Tensor, ...]:
    """Return the arguments of both rules for rejection."""
    used = batch.used_rows()  # rows of sampled slots only
    target = _laws(processed, rows, used)
    return (
        target[batch.row_index(used)],  # [B, K+1, V]
        batch.draft_log_probs(processed.shape[1]),  # [B, K, V]
        batch.draft_ids,
        batch.num_drafted,
        batch.accept_uniforms(),
        batch.first_keys(),
    )


class Batch:
    """Holds slots of one acceptance rule, padded to the widest."""

    def __init__(self, ready: list[Ready], starts: list[int], device: torch.device) -> None:
        """Take slots and the row of the step's logits at which each begins."""
        self._ready = ready
        self._device = device
        counts = [len(r.draft_ids) for r in ready]
        self._width = width = max(counts)
        self.num_drafted = to_device(np.array(counts), device)  # [B]
        padded = [[*r.draft_ids, *[0] * (width - len(r.draft_ids))] for r in ready]
        self.draft_ids = to_device(np.array(padded, dtype=np.int64).reshape(len(ready), width), device)  # [B, K]
        # Rows past a slot's own K repeat its last one; the rules never look at them.
        self._rows = np.array([[s + min(j, n) for j in range(width + 1)] for s, n in zip(starts, counts, strict=True)])

    @property
    def is_lenient(self) -> bool:
        return any(r.slot.params.lenience < 1.0 for r in self._ready)

    def is_draft(self) -> Tensor:
        """Return what is not padding, [B, K] bool."""
        return torch.arange(self._width, device=self._device) < self.num_drafted[:, None]

    def lenience(self) -> Tensor:
        """Return the slots' lenience [B] float64."""
        return to_device(np.array([r.slot.params.lenience for r in self._ready]), self._device)

    def used_rows(self) -> list[int]:
        """Return the rows that any slot uses, ascending; those of one slot lie side by side."""
        return np.unique(self._rows).tolist()

    def keys_of_used_rows(self) -> tuple[list[SamplingParams], list[int]]:
        """Return whose each used row is, and the position in the sequence that it decides."""
        own = [(r, j) for r in self._ready for j in range(len(r.draft_ids) + 1)]
        return [r.slot.params for r, _ in own], [len(r.slot.committed) + j for r, j in own]

    def row_index(self, among: Sequence[int] | None = None) -> Tensor:
        """Return rows of the step's logits [B, K+1] int64, or their places `among` some of them, ascending."""
        rows = self._rows if among is None else np.searchsorted(among, self._rows)
        return to_device(rows, self._device)

    def draft_log_probs(self, vocab_size: int) -> Tensor:
        """Return the drafts' laws [B, K, V] float32; padding rows are -inf."""
        laws = [
            (b * self._width + j, law) for b, r in enumerate(self._ready) for j, law in enumerate(r.draft_laws or ())
        ]
        shape = (len(self._ready), self._width, vocab_size)
        return scattered(laws, shape[0] * shape[1], vocab_size, self._device).view(shape)

    def accept_uniforms(self) -> Tensor:
        """Return a number for each draft and for what stands in its place, [B, K] float64."""
        width = self._width
        params = [r.slot.params for r in self._ready for _ in range(width)]
        rounds = [len(r.slot.committed) for r in self._ready for _ in range(width)]
        positions = [len(r.slot.committed) + j for r in self._ready for j in range(width)]
        numbers = host_slot_uniforms(params, rounds, positions, [Purpose.ACCEPT])
        return to_device(numbers, self._device).view(len(self._ready), width)

    def first_keys(self) -> Tensor:
        """Return what the numbers of each slot's first new position are keyed with, [B, 4] int64."""
        params, positions = [r.slot.params for r in self._ready], [len(r.slot.committed) for r in self._ready]
        return device_keys(params, positions, self._device)
