"""A beam search in a slot that steps by itself: what its step is fed, what that decides, and what is kept of it.

Leviathan et al. (2023), A.4. A step feeds the last tokens of the live beams and the drafts below them. It decides level
by level, by the target's own sums, and goes deeper while all live beams of a level are among what was fed. So a step
decides at least one level, and drafts change no answer. Where memory was lost the beams are fed anew, in pieces as a
prompt is, and nothing is decided before the last of them. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cuda.host_copy import to_host
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import NonFiniteLogits
from outrider.engine.speculation.beam import BeamSearch, Level, draft_shape
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.candidates import Offer
from outrider.engine.speculation.nodes import TREE_ROOT, NodeKind, Nodes
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import Node
from outrider.engine.step_plan import Row
from outrider.engine.worker.slots import Slot
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation
from target_service.draft_buffer import MAX_BUFFERED_NODES, InsertedNodes


@dataclass(frozen=True, slots=True)
class Fed:
    """What a step feeds of a search."""

    row: Row
    num_tail: int
    """Settled tokens among it, the first."""
    nodes: Sequence[Node]
    """The rest: those of beams, then drafts."""
    num_drafts: int

    @property
    def depth(self) -> int:
        """Return how many levels of drafts are among them."""
        drafts = self.nodes[len(self.nodes) - self.num_drafts :]
        return drafts[-1].position - drafts[0].position + 1 if drafts else 0


class Beams:
    """Of one lease."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        levels: Sequence[Level],
        eos_token_ids: Sequence[int],
        speculation: Speculation,
        max_prefill_tokens: int,
    ) -> None:
        """levels: what is decided already. max_prefill_tokens: how much of them a step feeds at most, where the cache
        holds nothing of them.
        """
        assert params.beams is not None, "no beam search is asked for"
        self._max_len = len(prompt_ids) + params.max_tokens
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.search = BeamSearch(params.beams, params.max_tokens, stop_ids)
        for level in levels:
            self.search.apply(level)
        self.tree = BeamTree(prompt_ids)
        self.settled: list[int] = [] if self.search.is_done else self.tree.advance(levels)
        """Ids behind the prompt that all beams began with when the lease did."""
        width, fixed = params.beams.width, speculation.num_draft_tokens
        self._draft_width, self._draft_depth = draft_shape(width, fixed, speculation.max_draft_tokens)
        self._max_prefill_tokens = max_prefill_tokens
        self._num_drafts = 0
        self._offered: list[tuple[float, Node, int]] = []
        self.ended = False
        """No more drafts come under the live beams."""

    @property
    def length(self) -> int:
        """Return the tokens of each live beam."""
        return self.tree.length

    # drafts

    @property
    def depth(self) -> int:
        """Return how many levels of drafts a step may use: it decides one more."""
        return max(0, min(self._draft_depth, self._max_len - self.length - 1))

    @property
    def num_here(self) -> int:
        """Return how many levels of drafts are here."""
        return len(self._draft_levels())

    def insert(self, nodes: Nodes) -> InsertedNodes:
        """Take in what a draft delivered, under the beams that were live at its root_len."""
        live, places = self.tree.live_at(nodes.root_len), dict[int, Node | None]()
        num_late, num_dropped = 0, 0
        for index, (token_id, parent_at) in enumerate(zip(nodes.ids, nodes.parents, strict=True)):
            beam = TREE_ROOT - parent_at
            parent = places.get(parent_at) if beam < 0 else live[beam] if beam < len(live) else None
            places[index] = None
            if parent is None:
                num_dropped += nodes.kinds[index] is not NodeKind.KNOWN
                continue
            found = next((child for child in parent.children if child.token_id == token_id), None)
            if parent.position < self.length - 1:
                num_late += found is not None and nodes.kinds[index] is NodeKind.GUESS
            elif nodes.kinds[index] is NodeKind.GUESS:
                if found is None and self._num_drafts >= MAX_BUFFERED_NODES:
                    num_dropped += 1
                    continue
                self._num_drafts += found is None
                found = found or self.tree.child(parent, token_id)
                found.rank = nodes.ranks[index]
            places[index] = found
        self.ended |= bool(nodes.ends) and nodes.root_len == self.length
        return InsertedNodes(num_late, num_dropped)

    def offers(self, slot: Slot, shares: SlotShares) -> list[Offer]:
        """Return the drafts that the next step might verify, as the budget takes them."""
        self._offered = []
        if not self.is_behind(slot):
            max_drafts = slot.most_cached - len(slot.cached) - self.num_fed(slot)
            self._offered = self.candidates(shares)[: max(0, max_drafts)]
        return [Offer(prob, ((0, index),)) for index, (prob, _, _) in enumerate(self._offered)]

    def pending_prob(self, slot: Slot, shares: SlotShares) -> float | None:
        """Return the chance that the next level of drafts would be accepted; None where no more may come."""
        if self.num_here >= self.depth or self.ended or self.is_behind(slot):
            return None
        return shares.share(0) ** (self.num_here + 1)

    def learn(self, shares: SlotShares, fed: Fed, num_accepted: int) -> None:
        """Learn how many of the levels of drafts that a step was fed were accepted."""
        for _ in range(num_accepted):
            shares.note(0)
        if num_accepted < fed.depth:
            shares.note(None)
        if not fed.num_drafts:
            shares.forget()

    def candidates(self, shares: SlotShares) -> list[tuple[float, Node, int]]:
        """Return the drafts that a step might verify, level by level and each best first: with the tokens that they are
        expected to bring, and the index of their parent among them, or TREE_ROOT.
        """
        found, place, chance = list[tuple[float, Node, int]](), dict[int, int](), 1.0
        for level in self._draft_levels():
            chance *= shares.share(0)
            for node in level:
                place[id(node)] = len(found)
                found.append((chance / len(level), node, place.get(id(node.parent), TREE_ROOT)))
        return found

    def _draft_levels(self) -> list[list[Node]]:
        levels, above = list[list[Node]](), self.tree.live
        while len(levels) < self.depth:
            below = sorted((child for node in above for child in node.children), key=lambda node: node.rank)
            if len(below) < len(self.tree.live):
                break  # not all beams can be among them
            above = below[: self._draft_width]
            levels.append(above)
        return levels

    # steps

    def num_fed(self, slot: Slot) -> int:
        """Return the tokens that the next step feeds without drafts."""
        piece = self._piece(slot)
        return _num_tail(slot) + len(self.tree.unfed() if piece is None else piece)

    def is_behind(self, slot: Slot) -> bool:
        """Return whether the next step decides nothing: more is to be fed before."""
        return self._piece(slot) is not None

    def _piece(self, slot: Slot) -> list[Node] | None:
        """Return the nodes before the live beams' last tokens that the next step feeds, parents first, where all that
        is to be fed is too much for it; None where it is not.
        """
        self._check_cache(slot)
        most, unfed = self._max_prefill_tokens - _num_tail(slot), self.tree.unfed()
        inner = unfed[: max(0, len(unfed) - len(self.tree.live))]
        return inner[: max(0, most)] if inner and len(unfed) > most else None

    def feed(self, slot: Slot, num_drafts: int) -> Fed:
        """Return the slot's share of the next forward, whose tokens are taken to be in the cache from here on, with the
        first num_drafts of what was offered; of their last level as many as there are live beams, or none.
        """
        drafts: Sequence[Node] = [node for _, node, _ in self._offered[:num_drafts]]
        piece, tree, tail = self._piece(slot), self.tree, slot.committed[len(slot.cached) :]
        num_last = sum(node.position == drafts[-1].position for node in drafts)
        if piece is not None:
            drafts = ()
        elif num_last < len(tree.live):
            drafts = drafts[: len(drafts) - num_last]
        nodes = [*tree.unfed(), *drafts] if piece is None else piece
        parents = [*range(TREE_ROOT, len(tail) - 1), *tree.parents_of(nodes, len(tail) - 1)]
        new_ids = [*tail, *(node.token_id for node in nodes)]
        num_logits = len(tree.live) + len(drafts) if piece is None else 0
        row = Row(slot.table, new_ids, len(slot.cached), num_logits, slot.cached, parents, source=slot.source)
        for node in (*([tree.root] if tail else []), *nodes):
            tree.feed(node)
        return Fed(row, len(tail), nodes, len(drafts))

    def _check_cache(self, slot: Slot) -> None:
        """Forget what was fed where memory was taken for others meanwhile."""
        tree = self.tree
        if not tree.root.is_fed or len(slot.cached) != len(slot.committed) + len(tree.fed):
            tree.forget_cache()
            slot.truncate(len(slot.committed))

    def decide(self, fed: Fed, read: ReadBest) -> list[Level]:
        """Return the levels that a step decides. read: of the rows after the live beams, and then after the drafts.
        Raises NonFiniteLogits, deciding nothing, where the first of them are.
        """
        num_live = len(self.tree.live)
        drafts = fed.nodes[len(fed.nodes) - fed.num_drafts :]
        row_of = {(id(node.parent), node.token_id): num_live + place for place, node in enumerate(drafts)}
        rows, live = list(range(num_live)), self.tree.live
        levels = list[Level]()
        while True:
            best = read(rows, self.search.num_candidates)
            if not best.are_finite.all():
                if not levels:
                    raise NonFiniteLogits(rows)
                return levels  # what is decided is sound
            level = self.search.choose(best.ids, best.log_probs)
            self.search.apply(level)
            levels.append(level)
            following = [row_of.get((id(live[parent]), token_id)) for parent, token_id, _ in level.live]
            if self.search.is_done or None in following:
                return levels
            rows = [row for row in following if row is not None]
            live = [drafts[row - num_live] for row in rows]

    def go_on(self, slot: Slot, fed: Fed, levels: Sequence[Level], runner: ModelRunner) -> int:
        """Keep of what a step fed what lies on the way to the live beams, and commit what they all begin with. Return
        how many drafts are given up.

        Raises OutOfBlocks.
        """
        tree, start, num_tail = self.tree, fed.row.tree_start, fed.num_tail
        settled = tree.advance(levels)
        keep = [*range(num_tail), *(num_tail + place for place in tree.keep(tree.inner()))]
        ids = [slot.cached[start + place] for place in keep]
        runner.rebase(slot.table, start, keep)
        slot.commit_from(len(slot.committed), settled)
        slot.rebased(start, ids)
        if tree.root in tree.live:  # it is fed with the next step: its logits are what that goes by
            tree.root.is_fed = False
            slot.reconcile()
        before, self._num_drafts, self.ended = self._num_drafts, len(_below(tree.live)), False
        return before - self._num_drafts


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The likeliest tokens after some rows of a step, on the host."""

    ids: NDArray[np.int64]
    """[R, C], best first."""
    log_probs: NDArray[np.float32]
    """[R, C]."""
    are_finite: NDArray[np.bool_]
    """[R]: whether all log-probs of a row are."""


ReadBest = Callable[[Sequence[int], int], BestTokens]
"""Returns so many of the likeliest tokens after these rows, or all where there are fewer."""


def best_reader(logits: Tensor, max_num: int) -> ReadBest:
    """Return a function that reads at most max_num of the likeliest tokens after rows of logits [R, V] float32.

    On a device those of all rows are found at once: which rows a level needs is known once the one before is decided,
    and would be a wait for each. A host computes with those alone that are asked for.
    """
    if HostLogits.reads(logits) or not len(logits):
        return lambda rows, num: _best_tokens(logits[list(rows)], num)
    found = _best_tokens(logits, max_num)

    def read(rows: Sequence[int], num: int) -> BestTokens:
        places = list(rows)
        return BestTokens(found.ids[places, :num], found.log_probs[places, :num], found.are_finite[places])

    return read


def _best_tokens(logits: Tensor, num: int) -> BestTokens:
    log_probs = torch.log_softmax(logits, dim=-1)  # [R, V] float32
    best = log_probs.topk(min(num, log_probs.shape[1]), dim=-1)
    parts = (best.indices, best.values, log_probs.isfinite().all(dim=-1))
    ids, values, are_finite = parts if HostLogits.reads(logits) else to_host(*parts)
    return BestTokens(ids.numpy(), values.numpy(), are_finite.numpy())


def _num_tail(slot: Slot) -> int:
    """Return the settled tokens that are not in the cache."""
    return max(0, len(slot.committed) - len(slot.cached))


def _below(nodes: Sequence[Node]) -> list[Node]:
    found = list[Node]()
    for node in nodes:
        found += node.children
        found += _below(node.children)
    return found
