"""Lookahead decoding (Fu et al., 2024, 2402.02057): n-grams that the target writes beside its output, as draft tokens.

A window of W columns follows the last token, column i at i tokens' distance, N - 1 tokens deep. It is fed with each
step, and what the target says most likely after each column is its N-th token: N tokens that the target might say in a
row, made in N - 1 steps (Jacobi iteration). They go to a pool; the window moves on by a token. Of the pool, those that
begin with the last token are proposed. Nothing but the slot's own window fills its pool, so that nobody's speed tells
of another's text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from random import Random

from torch import Tensor

from outrider.engine.cuda.host_copy import DeferredCopies
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.target_drafter import ExtraRows, TargetDrafter
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import Drafter
from outrider.wire.lookahead_shape import LookaheadShape

MAX_STARTS = 1024
"""First tokens of n-grams that are kept, about 500 bytes for each with G = 5; then the one met longest ago goes."""


class Lookahead:
    """The window and the pool of one sequence. Neither knows a position: what is committed otherwise than it seemed
    leaves both of use.
    """

    def __init__(self, shape: LookaheadShape, token_ids: Sequence[int]) -> None:
        """Begin with any of these tokens: the sequence's, and what an encoder reads."""
        self.shape = shape
        some_ids = Random(len(token_ids)).choices(token_ids, k=shape.num_window_tokens)
        first_len = shape.window - 1
        self._levels = [some_ids[:first_len]]
        """By depth, the window's tokens by column; the first column's first is the sequence's last token, and not
        here."""
        for start in range(first_len, len(some_ids), shape.window):
            self._levels.append(some_ids[start : start + shape.window])
        self._pool: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()
        """By first token, what follows it in n-grams, the latest last."""

    @property
    def ids(self) -> list[int]:
        """The window's tokens, level by level: what is fed with the sequence's last token."""
        return list(chain.from_iterable(self._levels))

    @property
    def parents(self) -> list[int]:
        """For each of `ids`, the index of the one that it follows: on the first level the one in the column before,
        else the one above; ROOT for the sequence's last token.
        """
        window, num_ids = self.shape.window, self.shape.num_window_tokens
        return [*range(-1, window - 2), *range(-1, window - 1), *range(window - 1, num_ids - window)]

    def learn(self, last_id: int, new_ids: Sequence[int]) -> None:
        """Take what the target says after the last of `ids`, of each column in order, and move on by a token. last_id:
        the token that the window followed.
        """
        first, *deeper = self._levels
        for start, *following in zip((last_id, *first), *deeper, new_ids, strict=True):
            self._keep(start, tuple(following))
        self._levels = [deeper[0][1:], *deeper[1:], list(new_ids)]

    def _keep(self, start: int, following: tuple[int, ...]) -> None:
        known = self._pool.setdefault(start, {})
        known.pop(following, None)
        known[following] = None
        if len(known) > self.shape.guesses:
            del known[next(iter(known))]
        self._pool.move_to_end(start)
        if len(self._pool) > MAX_STARTS:
            self._pool.popitem(last=False)

    def after(self, last_id: int) -> list[tuple[int, ...]]:
        """Return what may follow the token, N - 1 ids each, the latest first; none where no n-gram begins with it."""
        return list(reversed(self._pool.get(last_id, {})))


class LookaheadDrafter(TargetDrafter):
    """Feeds each slot's window beside its steps, and proposes n-grams of its pool."""

    def __init__(self, shape: str, context_limit: int) -> None:
        """shape: as `LookaheadShape.parse` reads it. context_limit: most tokens of a sequence; a window near it would
        reach past it, and is not fed.
        """
        self._shape = LookaheadShape.parse(shape)
        self._max_committed = context_limit - (self._shape.window - 1) - (self._shape.ngram - 2)
        self._windows: dict[SlotKey, Lookahead] = {}
        self._last_ids: dict[SlotKey, int] = {}
        """Of slots whose windows have not learnt yet what the last step said: the token that it was said after."""
        self._best_ids = DeferredCopies[SlotKey]()
        """What it said."""

    def open(self, job: OpenJob, slot: Slot) -> None:
        self._windows[slot.key] = Lookahead(self._shape, [*job.source_ids, *slot.committed])

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        del self._windows[key]
        self._last_ids.pop(key, None)
        self._best_ids.drop(key)

    def has_next(self, slot: Slot) -> bool:
        return bool(self._window(slot.key).after(slot.committed[-1]))

    def propose(self, slot: Slot, state: SamplingState, shares: SlotShares, max_tokens: int) -> CandidateTree:
        """Return n-grams that begin alike as branches of one tree; with lenience, which is of chains, the latest."""
        ngrams = self._window(slot.key).after(slot.committed[-1])
        if slot.params.lenience < 1.0:
            ngrams = ngrams[:1]
        tree = DraftTree()
        for ngram in ngrams:
            node, prob = ROOT, 1.0
            for token_id in ngram:
                child = tree.child(node, token_id)
                if child is None:
                    child = tree.add(node, token_id, prob=prob * shares.share(len(tree.children(node))))
                node, prob = child, tree.probs[child]
        best = sorted(range(len(tree)), key=lambda node: -tree.probs[node])[:max_tokens]
        return CandidateTree(tree.select(best), [None] * len(best), shares.share(0))

    def rows_beside(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        shape, window = self._shape, self._window(slot.key)
        if len(slot.committed) > self._max_committed:
            return None
        placed = list[int]()
        for parent in window.parents:
            placed.append(parent if parent == ROOT else len(parents) + parent)
        return ExtraRows(Drafter.LOOKAHEAD, window.ids, placed, len(parents), shape.guesses, shape.ngram - 1)

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        self._last_ids[slot.key] = slot.committed[-1]
        self._best_ids.add(slot.key, logits[-self._shape.window :].argmax(dim=-1))  # after the last level

    def _window(self, key: SlotKey) -> Lookahead:
        """Return a slot's window, which has learnt what the last step said."""
        window, last_id = self._windows[key], self._last_ids.pop(key, None)
        if last_id is not None:
            best_ids = self._best_ids.get(key)
            assert best_ids is not None, "a step has said nothing"
            window.learn(last_id, best_ids.tolist())
        return window
