"""A beam search in a slot that steps by itself: what its step is fed, what that decides, and what is kept of it.

Leviathan et al. (2023), A.4. A step feeds the last tokens of the live beams and the draft tokens below them. It
decides level by level, by the target's own sums, and goes deeper while all live beams of a level are among what was
fed. So a step decides at least one level, and draft tokens change no answer. Where cached tokens were lost the beams
are fed anew, in pieces as a prompt is, and nothing is decided before the last of them. Runs on the engine thread.
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
from outrider.engine.speculation.beam import BeamSearch, Level
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.candidates import Offer
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.step_plan import Row
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation

if TYPE_CHECKING:
    from outrider.engine.drafters import SearchDrafts


class Fed(NamedTuple):
    """What a step feeds of a search."""

    row: Row
    num_tail: int
    """Settled tokens among it, the first."""
    drafts: Sequence[int]
    """Nodes of draft tokens, the last of the row."""
    depth: int
    """Number of levels of draft tokens."""


class Beams:
    """The search of one lease."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        levels: Sequence[Level],
        eos_token_ids: Sequence[int],
        speculation: Speculation,
        max_prefill_tokens: int,
        make_drafts: type[SearchDrafts],
    ) -> None:
        """levels: what is decided already. max_prefill_tokens: how much of them a step feeds at most, where the cache
        holds nothing of them. make_drafts: makes what holds the draft tokens.
        """
        assert params.beams is not None, "no beam search is asked for"
        self.search = BeamSearch(params.beams, params.max_tokens, params.stop_ids(eos_token_ids))
        for level in levels:
            self.search.apply(level)
        self.tree = BeamTree(prompt_ids)
        self.settled: Sequence[int] = ()
        """Ids behind the prompt that all beams began with when the lease did."""
        if not self.search.is_done:
            self.settled = self.tree.advance(levels)
        self.drafts = make_drafts(self.tree, len(prompt_ids) + params.max_tokens, params, speculation)
        self._max_prefill_tokens = max_prefill_tokens

    def offers(self, slot: Slot, shares: SlotShares) -> list[Offer]:
        """Return the draft tokens that the next step might feed, as the budget takes them; none where it feeds a piece
        of the beams and decides nothing.
        """
        nodes, is_last = self._next_nodes(slot)
        if not is_last:
            return []
        num_cached = len(slot.cached) + _num_tail(slot) + len(nodes)
        return self.drafts.offers(shares, slot.most_cached - num_cached)

    def pending_prob(self, slot: Slot, shares: SlotShares) -> float | None:
        """Return the probability that the next level of draft tokens would be accepted; None where none may come."""
        _, is_last = self._next_nodes(slot)
        if not is_last:
            return None
        return self.drafts.pending_prob(shares)

    def num_fed(self, slot: Slot) -> int:
        """Return the number of tokens that the next step feeds without draft tokens."""
        nodes, _ = self._next_nodes(slot)
        return _num_tail(slot) + len(nodes)

    def _next_nodes(self, slot: Slot) -> tuple[list[int], bool]:
        """Return the nodes of beams that the next step feeds, parents first, and whether no more are to be fed: else
        the step decides nothing. Where all are too many for one step, it feeds a piece of those before the live beams'
        last tokens.
        """
        tree = self.tree
        if not tree.is_root_fed or len(slot.cached) != len(slot.committed) + len(tree.fed):
            tree.forget_cache()  # memory was taken for others meanwhile
            slot.truncate(len(slot.committed))
        inner, max_fed = tree.unfed(tree.inner()), max(0, self._max_prefill_tokens - _num_tail(slot))
        nodes = [*inner, *tree.unfed(tree.live)]
        if not inner or len(nodes) <= max_fed:
            return nodes, True
        return inner[:max_fed], False

    def feed(self, slot: Slot, num_drafts: int) -> Fed:
        """Return the slot's share of the next forward, whose tokens count as cached from here on. num_drafts: of
        `offers`, the first; a step that decides nothing feeds none.
        """
        tree = self.tree
        nodes, is_last = self._next_nodes(slot)
        drafts, depth = self.drafts.chosen(num_drafts if is_last else 0)
        nodes = [*nodes, *drafts]
        tail = slot.committed[len(slot.cached) :]
        parents = [*range(ROOT, len(tail) - 1), *tree.parents_of(nodes, len(tail) - 1)]
        new_ids = [*tail, *(tree.ids[node] for node in nodes)]
        num_logits = len(tree.live) + len(drafts) if is_last else 0
        row = Row(slot.table, new_ids, len(slot.cached), num_logits, slot.cached, parents, source=slot.source)
        if tail:
            tree.feed(ROOT)
        for node in nodes:
            tree.feed(node)
        return Fed(row, len(tail), drafts, depth)

    def decide(self, fed: Fed, best: BestTokens, first_row: int) -> list[Level]:
        """Return the levels that a step decides. best: the likeliest tokens after all rows of the step; those of this
        search begin with first_row, the live beams before the draft tokens. Raises NonFiniteLogits, deciding nothing,
        where those of the live beams are not finite.
        """
        tree, search = self.tree, self.search
        live: list[int] = tree.live
        rows = list(range(first_row, first_row + len(live)))
        row_of: dict[int | None, int] = {}
        for node in fed.drafts:
            row_of[node] = first_row + len(live) + len(row_of)
        levels = list[Level]()
        while True:
            if not best.are_finite[rows].all():
                if not levels:
                    raise NonFiniteLogits(rows)
                return levels  # what is decided is sound
            num = search.num_candidates
            level = search.choose(best.ids[rows, :num], best.log_probs[rows, :num])
            search.apply(level)
            levels.append(level)
            following = [tree.child(live[beam], token_id) for beam, token_id, _ in level.live]
            if search.is_done or not row_of.keys() >= set(following):
                return levels
            live = [node for node in following if node is not None]
            rows = [row_of[node] for node in live]

    def advance(self, slot: Slot, fed: Fed, levels: Sequence[Level], runner: ModelRunner) -> int:
        """Keep those fed tokens that lie on the way to the live beams, and commit what they all begin with. Return how
        many draft tokens are dropped.

        Raises OutOfBlocks.
        """
        tree, start, num_tail = self.tree, fed.row.tree_start, fed.num_tail
        num_drafts = len(tree.drafts())
        settled = tree.advance(levels)
        keep = [*range(num_tail), *(num_tail + index for index in tree.keep(tree.inner()))]
        ids = [slot.cached[start + index] for index in keep]
        runner.rebase(slot.table, start, keep)
        slot.commit_from(len(slot.committed), settled)
        slot.rebased(start, ids)
        if ROOT in tree.live:  # it is fed with the next step: its logits are what that goes by
            tree.is_root_fed = False
            slot.reconcile()
        self.drafts.is_ended = False
        return num_drafts - len(tree.drafts())


class BestTokens(NamedTuple):
    """The likeliest tokens after the rows of a step, on the host."""

    ids: NDArray[np.int64]
    """[R, C], best first."""
    log_probs: NDArray[np.float32]
    """[R, C]."""
    are_finite: NDArray[np.bool_]
    """[R]: whether all log-probs of a row are."""


def best_tokens(logits: Tensor, max_num: int) -> BestTokens:
    """Return the max_num likeliest tokens after each row of logits [R, V] float32, or all where there are fewer."""
    log_probs = torch.log_softmax(logits, dim=-1)  # [R, V] float32
    best = log_probs.topk(min(max_num, log_probs.shape[1]), dim=-1)
    found = to_host(best.indices, best.values, log_probs.isfinite().all(dim=-1))
    return BestTokens(*(tensor.numpy() for tensor in found))


def _num_tail(slot: Slot) -> int:
    """Return the settled tokens that are not in the cache."""
    return max(0, len(slot.committed) - len(slot.cached))
