"""What comes after each node of trees of drafts, on a device: an id a row of a step's logits. The host then walks the
trees by these ids, and waits for them alone.

After a node comes the first draw that is kept there, else what the target draws itself. That follows from the node's
own row and from numbers that are known before, so that all rows of all trees are computed at once: to look at one after
the other would be a wait for each. The law is that of `tree_acceptance.accept_tree`. Called by `decide_on_device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.sampling.acceptance import residual
from outrider.engine.sampling.coupled import MAX_NUMBERS, device_keys, picked
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.sampling import argmax, distributions, probabilities
from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree
from outrider.engine.sampling.wire_tensors import scattered
from outrider.wire.params import SamplingParams
from target_service.lease import Ready


@dataclass(frozen=True, slots=True)
class DrawTest:
    """One draw after a node, in the order in which they are tested."""

    token_id: int
    u: float
    law: RowLaw | None
    """What it was drawn from, of the first of its source; the next ones are drawn from what is left of that."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """The row of a step's logits after a node of a tree."""

    index: int
    """Among the step's rows."""
    params: SamplingParams
    position: int
    """In the sequence, of the token that it decides."""
    tests: Sequence[DrawTest] = ()


@dataclass(frozen=True, slots=True)
class NextIds:
    """What comes after each of N nodes."""

    ids: Tensor
    """[N] int64."""
    sound: Tensor
    """[N] bool: whether there was positive finite mass to draw from."""


def accept_numbers(trees: Sequence[tuple[Ready, DraftTree]]) -> list[dict[tuple[int, int], float]]:
    """Return the numbers by which the draws of each tree are kept, by the depth of the node that they follow and their
    place there: as in a chain, that of its position.
    """
    keys = [_draw_keys(ready, tree) for ready, tree in trees]
    if not any(keys):
        return [{} for _ in trees]
    owners = [(ready, key) for (ready, _), own in zip(trees, keys, strict=True) for key in own]
    committed_lens = [len(ready.slot.committed) for ready, _ in owners]
    numbers = host_slot_uniforms(
        [ready.slot.params for ready, _ in owners],
        committed_lens,
        [base + depth for base, (_, (depth, _)) in zip(committed_lens, owners, strict=True)],
        [Purpose.ACCEPT],
        [place for _, (_, place) in owners],
    )[0].tolist()
    ends = list(accumulate(len(own) for own in keys))
    return [dict(zip(own, numbers[end - len(own) : end], strict=True)) for own, end in zip(keys, ends, strict=True)]


def _draw_keys(ready: Ready, tree: DraftTree) -> list[tuple[int, int]]:
    found = set[tuple[int, int]]()
    for parent, sources in ready.drawn.items():
        num_drawn = sum(len(source.nodes) for source in sources)
        found.update((tree.depth(parent), place) for place in range(num_drawn))
    return sorted(found)


def node_rows(trees: Sequence[tuple[Ready, DraftTree]], starts: Sequence[int]) -> list[NodeRow]:
    """Return the rows of each tree: after its root, and then after each of its nodes. starts: a tree's first row."""
    found = list[NodeRow]()
    for (ready, tree), numbers, start in zip(trees, accept_numbers(trees), starts, strict=True):
        committed_len = len(ready.slot.committed)
        for node in range(ROOT, len(tree.ids)):
            depth = tree.depth(node)
            tests = () if ready.is_walked else _tests(ready, tree, node, numbers)
            found.append(NodeRow(start + 1 + node, ready.slot.params, committed_len + depth, tests))
    return found


def _tests(ready: Ready, tree: DraftTree, node: int, numbers: dict[tuple[int, int], float]) -> list[DrawTest]:
    found = list[DrawTest]()
    depth = tree.depth(node)
    for source in ready.drawn.get(node, ()):
        for place, child in enumerate(source.nodes):
            law = source.law if place == 0 else None
            found.append(DrawTest(tree.ids[child], numbers[depth, len(found)], law))
    return found


def next_ids(nodes: Sequence[NodeRow], processed: Tensor, rows: Sequence[LogitRow]) -> NextIds:
    """Return what comes after each node. processed: the step's logits [R, V] float32 as its rows' requests have them;
    rows: all R. The host waits for nothing here.
    """
    if not nodes:
        none = torch.empty(0, dtype=torch.int64, device=processed.device)
        return NextIds(none, none.bool())
    greedy = [place for place, node in enumerate(nodes) if node.params.greedy]
    sampled = [place for place, node in enumerate(nodes) if not node.params.greedy]
    sampled.sort(key=lambda place: len(nodes[place].tests))  # those without tests are decided together
    parts = list[NextIds]()
    if greedy:
        ids = argmax(processed[_indices([nodes[place] for place in greedy], processed.device)])
        parts.append(NextIds(ids, torch.ones_like(ids, dtype=torch.bool)))
    num_at_once = max(1, MAX_NUMBERS // processed.shape[1])
    for first in range(0, len(sampled), num_at_once):
        part = [nodes[place] for place in sampled[first : first + num_at_once]]
        log_probs = distributions(processed[_indices(part, processed.device)], [rows[node.index] for node in part])
        parts.append(_drawn_ids(part, log_probs))
    order = to_device(np.argsort([*greedy, *sampled]), processed.device)
    return NextIds(torch.cat([part.ids for part in parts])[order], torch.cat([part.sound for part in parts])[order])


def _indices(nodes: Sequence[NodeRow], device: torch.device) -> Tensor:
    return to_device(np.array([node.index for node in nodes]), device)


def _drawn_ids(nodes: Sequence[NodeRow], log_probs: Tensor) -> NextIds:
    """Return what comes after nodes by the target's laws [N, V] float32 there."""
    keys = device_keys([node.params for node in nodes], [node.position for node in nodes], log_probs.device)
    if not any(node.tests for node in nodes):
        has_mass = log_probs.amax(dim=1) > -torch.inf
        return NextIds(picked(log_probs, keys), has_mass)
    left, kept_ids = _tested(nodes, probabilities(log_probs))
    total = left.sum(dim=1)
    has_mass = (total > 0) & (total < torch.inf)
    is_kept = kept_ids >= 0
    return NextIds(torch.where(is_kept, kept_ids, picked(left.log(), keys)), is_kept | has_mass)


def _tested(nodes: Sequence[NodeRow], left: Tensor) -> tuple[Tensor, Tensor]:
    """Test the draws after each node, in order. left: the target's laws [N, V] float64.

    Returns what the target has left of them when no draw is kept [N, V], and the draw that is, -1 for none [N] int64.
    """
    device = left.device
    vocab_size = left.shape[1]
    num_tests = max(len(node.tests) for node in nodes)
    shape = (len(nodes), num_tests)
    token_ids = np.zeros(shape, dtype=np.int64)
    numbers = np.ones(shape)
    is_due = np.zeros(shape, dtype=np.bool_)
    for row, node in enumerate(nodes):
        for place, test in enumerate(node.tests):
            token_ids[row, place] = test.token_id
            numbers[row, place] = test.u
            is_due[row, place] = True
    ids = to_device(token_ids, device)
    u = to_device(numbers, device)
    due = to_device(is_due, device)
    kept_ids = torch.full((len(nodes),), -1, dtype=torch.int64, device=device)
    weights = torch.zeros_like(left)  # of the draft's laws, not normalised
    for place in range(num_tests):
        laws = [(row, test.law) for row, test in _at(nodes, place) if test.law is not None]
        if laws:
            is_new = np.zeros((len(nodes), 1), dtype=np.bool_)
            is_new[[row for row, _ in laws]] = True
            new = scattered(laws, len(nodes), vocab_size, device).double().exp()
            weights = torch.where(to_device(is_new, device), new, weights)
        at = ids[:, place : place + 1]  # [N, 1]
        draft = weights / weights.sum(dim=1, keepdim=True)
        draft_prob = draft.gather(1, at)[:, 0]
        is_tested = due[:, place] & (kept_ids < 0)
        is_kept = is_tested & (draft_prob > 0) & (u[:, place] < left.gather(1, at)[:, 0] / draft_prob)
        kept_ids = torch.where(is_kept, at[:, 0], kept_ids)
        rest = residual(left, draft)
        rest /= rest.sum(dim=1, keepdim=True)
        left = torch.where((is_tested & ~is_kept)[:, None], rest, left)
        weights.scatter_(1, at, 0.0)
    return left, kept_ids


def _at(nodes: Sequence[NodeRow], place: int) -> list[tuple[int, DrawTest]]:
    """Return the tests at a place of their nodes, with the nodes' rows."""
    return [(row, node.tests[place]) for row, node in enumerate(nodes) if place < len(node.tests)]
