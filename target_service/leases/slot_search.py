"""A beam search in a slot that steps by itself: the tokens that a step feeds, the levels that it decides, and the
cache.

Leviathan et al. (2023), A.4. A step feeds the last tokens of the live beams and the draft tokens below them. It decides
level by level, by the target's own sums of log-probs, as long as all live beams of a level were fed. So a step decides
at least one level, and draft tokens change no output. If the slot's cache was lost, the beams are fed anew in pieces,
like a prompt, and no level is decided before the last piece. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.host_copy import to_host
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.penalties import NonFiniteLogits
from outrider.engine.speculation.beam import BeamLevel, BeamSearch
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.candidates import BudgetItem
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.step_plan import Row
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation

if TYPE_CHECKING:
    from outrider.engine.drafter_table import SearchDrafts


class SearchInput(NamedTuple):
    """Tokens of a beam search that one step feeds."""

    row: Row
    num_tail: int
    """Number of the slot's committed tokens that are not cached yet. They are the first new tokens of `row`."""
    draft_nodes: Sequence[int]
    """Draft tokens, as nodes of the search's tree. They are the last new tokens of `row`."""
    depth: int
    """Number of levels of the search that the draft tokens in `draft_nodes` cover."""


class Beams:
    """Beam search of one lease: its live beams, and the draft tokens after them."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        levels: Sequence[BeamLevel],
        eos_token_ids: Sequence[int],
        speculation: Speculation,
        max_prefill_tokens: int,
        make_drafts: type[SearchDrafts],
    ) -> None:
        """Create a search that continues after `levels`, which are decided already.

        max_prefill_tokens: maximum number of tokens of the beams that one step feeds when the cache has lost them.
        make_drafts: class that holds the search's draft tokens.
        """
        assert params.beams is not None, "no beam search is asked for"
        self.search = BeamSearch(params.beams, params.max_tokens, params.stop_ids(eos_token_ids))
        for level in levels:
            self.search.apply(level)
        self.tree = BeamTree(prompt_ids)
        self.settled: Sequence[int] = ()
        """Token ids after the prompt that all live beams shared when the lease began."""
        if not self.search.is_done:
            self.settled = self.tree.advance(levels)
        self.drafts = make_drafts(self.tree, len(prompt_ids) + params.max_tokens, params, speculation)
        self._max_prefill_tokens = max_prefill_tokens

    def budget_items(self, slot: Slot, acceptance: SlotAcceptance) -> list[BudgetItem]:
        """Return the draft tokens that the next step might verify, in the order in which the budget chooses them.

        The list is empty if the cache has lost the beams and the next step can feed only a part of them again, which
        decides no level. acceptance: acceptance probabilities of the draft worker.
        """
        nodes, is_last = self._next_nodes(slot)
        if not is_last:
            return []
        num_cached = len(slot.cached) + _num_tail(slot) + len(nodes)
        return self.drafts.budget_items(acceptance, slot.max_cached_len - num_cached)

    def pending_prob(self, slot: Slot, acceptance: SlotAcceptance) -> float | None:
        """Return the probability that the next level of draft tokens, which has not arrived yet, is accepted. None if
        the next step cannot verify any.

        acceptance: acceptance probabilities of the draft worker.
        """
        _, is_last = self._next_nodes(slot)
        if not is_last:
            return None
        return self.drafts.pending_prob(acceptance)

    def num_fed(self, slot: Slot) -> int:
        """Return the number of tokens that the slot's next step feeds besides draft tokens."""
        nodes, _ = self._next_nodes(slot)
        return _num_tail(slot) + len(nodes)

    def _next_nodes(self, slot: Slot) -> tuple[list[int], bool]:
        """Return the nodes of beams that the next step feeds, parents first, and whether these are all that the cache
        misses. If they are not, the step decides nothing.
        """
        tree = self.tree
        if not tree.is_root_fed or len(slot.cached) != len(slot.committed) + len(tree.fed):
            tree.forget_cache()  # the slot was preempted meanwhile
            slot.truncate(len(slot.committed))
        inner = tree.unfed(tree.inner())
        nodes = [*inner, *tree.unfed(tree.active)]
        max_fed = max(0, self._max_prefill_tokens - _num_tail(slot))
        if not inner or len(nodes) <= max_fed:
            return nodes, True
        return inner[:max_fed], False  # a piece, without the live beams' last tokens

    def feed(self, slot: Slot, num_draft_tokens: int) -> SearchInput:
        """Return the slot's input to the next forward. Its tokens count as cached from here on.

        num_draft_tokens: number of `budget_items` to verify, from the first on. A step that decides no level verifies
        none.

            committed tokens t0, t1 are not cached, live beams a, b follow the root, draft token c follows a:
            new_ids [t0, t1, a, b, c], parents [-1, 0, 1, 1, 2], logits of the last 3
        """
        tree = self.tree
        nodes, is_last = self._next_nodes(slot)
        if not is_last:
            num_draft_tokens = 0
        draft_nodes, depth = self.drafts.chosen(num_draft_tokens)
        nodes = [*nodes, *draft_nodes]
        tail = slot.committed[len(slot.cached) :]
        parents = [*range(ROOT, len(tail) - 1), *tree.parents_of(nodes, len(tail) - 1)]
        new_ids = list(tail)
        for node in nodes:
            new_ids.append(tree.ids[node])
        num_logits = 0
        if is_last:
            num_logits = len(tree.active) + len(draft_nodes)
        row = Row(slot.table, new_ids, len(slot.cached), num_logits, slot.cached, parents, source=slot.source)
        if tail:
            tree.feed(ROOT)
        for node in nodes:
            tree.feed(node)
        return SearchInput(row, len(tail), draft_nodes, depth)

    def decide(self, fed: SearchInput, best: BestTokens, first_row: int) -> list[BeamLevel]:
        """Return the levels of the search that a step decides, at least one. The first level follows the live beams.
        Each further level needs the logits after all beams of the level before, so it is decided only if the step has
        fed all of these as draft tokens.

        fed: tokens that the step fed for this search. best: the likeliest tokens after all rows of the step. first_row:
        index in `best` of the search's first row; its live beams come first, then its draft tokens. Raises
        NonFiniteLogits if the logits after the live beams are NaN or infinite.
        """
        tree = self.tree
        search = self.search
        active: list[int] = tree.active
        rows = list(range(first_row, first_row + len(active)))
        row_of: dict[int | None, int] = {}
        for node in fed.draft_nodes:
            row_of[node] = first_row + len(active) + len(row_of)
        levels = list[BeamLevel]()
        while True:
            if not best.are_finite[rows].all():
                if not levels:
                    raise NonFiniteLogits(rows)
                return levels  # those before are sound
            num = search.num_candidates
            level = search.choose(best.ids[rows, :num], best.log_probs[rows, :num])
            search.apply(level)
            levels.append(level)
            children = [tree.child(active[beam], token_id) for beam, token_id, _ in level.active]
            if search.is_done or not row_of.keys() >= set(children):
                return levels  # a live beam was not fed, so that nothing is known after it
            active = []
            rows = []
            for child in children:
                if child is not None:
                    active.append(child)
                    rows.append(row_of[child])

    def advance(self, slot: Slot, fed: SearchInput, levels: Sequence[BeamLevel], runner: ModelRunner) -> int:
        """Advance the search by the levels that a step decided: cut the cache to the paths of the live beams, and
        commit the tokens that all live beams share.

        fed: tokens that the step fed for this search. Returns the number of dropped draft tokens. Raises OutOfBlocks if
        a block must be copied to cut the cache, and none is free.
        """
        tree = self.tree
        start = fed.row.tree_start
        num_draft_tokens = len(tree.drafts())
        settled = tree.advance(levels)
        keep = list(range(fed.num_tail))
        for index in tree.keep(tree.inner()):
            keep.append(fed.num_tail + index)
        ids = [slot.cached[start + index] for index in keep]
        runner.rebase(slot.table, start, keep)
        slot.commit_from(len(slot.committed), settled)
        slot.rebased(start, ids)
        if ROOT in tree.active:  # the root is a live beam: the next step feeds it again for its logits
            tree.is_root_fed = False
            slot.reconcile()
        self.drafts.is_ended = False
        return num_draft_tokens - len(tree.drafts())


class BestTokens(NamedTuple):
    """The C likeliest tokens after each of a step's R rows, on the host."""

    ids: NDArray[np.int64]
    """Ids of the C likeliest tokens after each row, best first, [R, C]."""
    log_probs: NDArray[np.float32]
    """Log-probs (natural logarithms) of the C tokens in `ids` after each row, [R, C]."""
    are_finite: NDArray[np.bool_]
    """For each row, whether all its log-probs are finite, [R]."""


def best_tokens(logits: Tensor, max_num: int) -> BestTokens:
    """Return the max_num likeliest tokens after each row of logits [R, V] float32; all V tokens if V is smaller."""
    log_probs = torch.log_softmax(logits, dim=-1)  # [R, V] float32
    best = log_probs.topk(min(max_num, log_probs.shape[1]), dim=-1)  # [R, C] values and indices
    ids, values, are_finite = to_host(best.indices, best.values, log_probs.isfinite().all(dim=-1))
    return BestTokens(ids.numpy(), values.numpy(), are_finite.numpy())


def _num_tail(slot: Slot) -> int:
    return max(0, len(slot.committed) - len(slot.cached))
