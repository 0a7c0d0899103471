"""Lookahead decoding (Fu et al., 2024, 2402.02057): the target itself computes n-grams in its steps, and proposes them.

A lookahead window of W columns follows the last token. Column i begins i tokens after it, and each column is N - 1
tokens deep. The window is fed in each step as extra rows, and the target's likeliest token after each column becomes
the column's N-th: an n-gram of N likely tokens, made in N - 1 steps (Jacobi iteration). The n-grams go to a pool, and
the window moves on by one token. The drafter proposes the n-grams of the pool that begin with the last token. Only the
slot's own window fills its pool, so that no request's speed depends on another's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from torch import Tensor

from outrider.engine.host_copy import DeferredCopies
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows, TargetDrafter
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.lookahead_shape import LookaheadShape

MAX_STARTS = 1024
"""Maximum number of different first tokens of the n-grams in a pool. Each takes about 600 bytes if it has 5 n-grams.
Above the maximum, the first token that has gone longest without a new n-gram is dropped."""


class Window:
    """Lookahead window and n-gram pool of one slot.

    Neither stores positions in the sequence, so both stay useful whatever tokens the target commits.
    """

    def __init__(self, shape: LookaheadShape, token_ids: Sequence[int]) -> None:
        """Create a window of random tokens from `token_ids`: those of the slot, and those of the encoder's input. The
        pool is empty.
        """
        self._shape = shape
        self.ids = Random(len(token_ids)).choices(token_ids, k=shape.num_window_tokens + 1)
        """Token ids of the window, by depth: first the id at the top of each column, then those below them, and so on.
        The first id is replaced by the last committed token when the window is fed."""
        self._pool = dict[int, list[list[int]]]()
        """Rests of the n-grams by their first token, the latest first."""

    def learn(self, new_ids: Sequence[int]) -> None:
        """Add the n-grams that a step completed to the pool, and move the window on by one token.

        `new_ids`: the target's likeliest token after each column of the window, in order.

            2 columns, [a, c] and [b, d], so that `ids` is [a, b, c, d]; n-grams of 3 tokens; new_ids [e, f]:
            the pool gets a -> [c, e] and b -> [d, f]; ids are then [c, d, e, f]
        """
        ids = [*self.ids, *new_ids]
        for column in range(len(new_ids)):
            start, *following = ids[column :: self._shape.window]
            known = self._pool.pop(start, [])
            if following in known:
                known.remove(following)
            self._pool[start] = [following, *known[: self._shape.max_ngrams - 1]]
            if len(self._pool) > MAX_STARTS:
                del self._pool[next(iter(self._pool))]
        self.ids = ids[self._shape.window :]

    def after(self, last_id: int) -> Sequence[Sequence[int]]:
        """Return the n-grams in the pool that begin with `last_id`, each without that first id, the latest first. Empty
        if there are none.
        """
        return self._pool.get(last_id, ())


class LookaheadDrafter(TargetDrafter):
    """Drafter in the target that adds each slot's lookahead window to its steps, and proposes n-grams of the slot's
    pool.
    """

    has_extra_rows = True

    def __init__(self, shape: str, context_limit: int) -> None:
        """Create a drafter. `shape`: "W,N,G", as in `LookaheadShape.parse`. `context_limit`: maximum number of tokens
        of a sequence.

        The window is not fed if it would exceed `context_limit`.
        """
        self._shape = LookaheadShape.parse(shape)
        self._context_limit = context_limit
        self._windows: dict[SlotKey, Window] = {}
        self._best_ids = DeferredCopies[SlotKey]()
        """By slot: the target's likeliest token after each column, [W], until `Window.learn` has taken it."""

    def open(self, job: OpenJob, slot: Slot) -> None:
        self._windows[slot.key] = Window(self._shape, [*job.source_ids, *slot.committed])

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        del self._windows[key]
        self._best_ids.drop(key)

    def has_next(self, slot: Slot) -> bool:
        return bool(self._window(slot.key).after(slot.committed[-1]))

    def propose(self, slot: Slot, state: SamplingState, acceptance: SlotAcceptance, max_tokens: int) -> CandidateTree:
        """Return the n-grams of the pool that begin with the last committed token, as one tree that shares common
        prefixes, cut to its `max_tokens` likeliest nodes. With a lenience below 1, use only the latest n-gram.
        """
        ngrams = self._window(slot.key).after(slot.committed[-1])
        if slot.params.lenience < 1.0:
            ngrams = ngrams[:1]
        tree = DraftTree()
        for ngram in ngrams:
            node = ROOT
            prob = 1.0
            for token_id in ngram:
                child = tree.child(node, token_id)
                if child is None:
                    child = tree.add(node, token_id, prob=prob * acceptance.prob(len(tree.children(node))))
                node = child
                prob = tree.probs[child]
        best = sorted(range(len(tree)), key=lambda node: -tree.probs[node])[:max_tokens]
        return CandidateTree(tree.select(best), [None] * len(best), acceptance.prob(0))

    def extra_rows(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        ids = self._window(slot.key).ids[1:]
        shape = self._shape
        if len(slot.committed) + shape.window + shape.ngram - 3 > self._context_limit:
            return None
        places = [ROOT, *range(len(parents), len(parents) + len(ids))]
        # a token of the first level follows the previous column's, any other the token above it
        placed = places[: shape.window - 1] + places[: -shape.window]
        return ExtraRows(Drafter.LOOKAHEAD, ids, placed, shape.max_ngrams, shape.ngram - 1)

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        self._windows[slot.key].ids[0] = slot.committed[-1]
        self._best_ids.add(slot.key, logits[-self._shape.window :].argmax(dim=-1))  # after the last level

    def _window(self, key: SlotKey) -> Window:
        window = self._windows[key]
        best_ids = self._best_ids.get(key)
        if best_ids is not None:
            window.learn(best_ids.tolist())
            self._best_ids.drop(key)
        return window
