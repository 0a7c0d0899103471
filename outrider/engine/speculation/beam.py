"""Beam search by sums of log-probs: which beams stay live and which have ended. Pure: no model, no torch, no I/O.

It is the search of transformers' `generate`. A step compares the best continuations of all live beams. Those of the
best `width` that end, by a stop id or at max_tokens, are hypotheses, scored by their sum of log-probs over length **
length_penalty; the best `width` that do not end are the live beams of the next step, so that a beam that ends does not
take the place of a live one. Sums and scores are float32 there and here.

A step decides a `BeamLevel`. The live beams all have the same length, so a level has a position, and like a token of an
output it is never taken back. Used by the target, the draft workers and the gateway's sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.params import MAX_CHOICES, BeamParams, SamplingParams, check_token_ids
from outrider.wire.requests.speculation import Speculation

DRAFT_BEAMS = 4
"""Number of beams that a draft worker grows per live beam. With 2, 3 and 4 of them (about 32 draft tokens, demo pair) a
step decided 1.6, 1.8 and 1.9 levels for 4 live beams, and 1.3, 1.4 and 1.5 for 8."""

Entry = tuple[int, int, float]
"""Continuation of a beam: (index of the continued beam, id of the new token, sum of log-probs including it, in
nats)."""


@dataclass(frozen=True, slots=True)
class BeamLevel:
    """Result of one level of a beam search: the continuations that stay live and those that end, best first."""

    active: tuple[Entry, ...]
    """Continuations that stay live; empty once outputs have max_tokens tokens."""
    ended: tuple[Entry, ...]
    """Continuations that end with a stop id or because max_tokens is reached; each is a hypothesis."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Complete output that a beam search has found."""

    ids: tuple[int, ...]
    """Token ids after the prompt, including a stop id."""
    score: float
    """Sum of log-probs, in nats, divided by the number of `ids` to the power of length_penalty."""
    stop_id: int | None
    """Stop id that ended the output; None if max_tokens ended it."""


class BeamSearch:
    """State of one beam search, which advances level by level until it `is_done`."""

    def __init__(self, params: BeamParams, max_tokens: int, stop_ids: Set[int]) -> None:
        self.levels: list[BeamLevel] = []
        self.sums: tuple[float, ...] = (0.0,)
        """Sum of log-probs of each live beam, in nats, best first. At first the prompt is the only beam, with sum 0."""
        self.is_done = False
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._ended: list[tuple[np.float32, int, Entry]] = []
        """The best `width` hypotheses, best first: score, number of levels before the last token, and that token's
        entry."""

    @property
    def num_candidates(self) -> int:
        """Number of best continuations per live beam that `choose` needs. It is large enough even if all stop ids are
        among them, and if all `width` beams continue the same beam.
        """
        return self._params.width + len(self._stop_ids)

    def choose(self, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> BeamLevel:
        """Return the next level, without applying it.

        ids, log_probs: [B, n], token ids of the best continuations of each of B live beams, best first, and their
        log-probs in nats. n is num_candidates, or the size of the vocabulary if that is smaller.

            width 2, sums of one beam's continuations a (ends) -1, b -2, c -3: ended [a], live [b, c]
        """
        width = self._params.width
        is_last = len(self.levels) + 1 >= self._max_tokens
        sums = log_probs + np.array(self.sums, dtype=np.float32)[:, None]  # [B, n] float32
        order = np.argsort(-sums, axis=None, kind="stable")  # [B * n]
        active = list[Entry]()
        ended = list[Entry]()
        for rank, place in enumerate(order.tolist()):
            if rank >= width and len(active) == width:
                break
            parent, at = divmod(place, sums.shape[1])
            entry = (parent, int(ids[parent, at]), float(sums[parent, at]))
            if is_last or entry[1] in self._stop_ids:
                if rank < width:
                    ended.append(entry)
                elif is_last:
                    break
            elif len(active) < width:
                active.append(entry)
        return BeamLevel(tuple(active), tuple(ended))

    def apply(self, level: BeamLevel) -> None:
        """Advance the search by a level that `choose` returned, in this process or in another."""
        num_levels = len(self.levels)
        self.levels.append(level)
        self.sums = tuple(total for _, _, total in level.active)
        divisor = self._divisor(num_levels + 1)
        for entry in level.ended:
            self._ended.append((np.float32(entry[2]) / divisor, num_levels, entry))
        self._ended.sort(key=lambda ended: -ended[0])
        del self._ended[self._params.width :]
        self.is_done = not level.active or self._cannot_improve()

    def _cannot_improve(self) -> bool:
        # transformers' heuristic, by which no live beam gets better than the worst hypothesis
        params = self._params
        if len(self._ended) < params.width:
            return False
        if params.early_stopping is EarlyStopping.TRUE:
            return True
        is_longest_best = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0.0
        length = len(self.levels)
        if is_longest_best:
            length = self._max_tokens
        best_score = np.float32(self.sums[0]) / self._divisor(length)
        return not best_score > self._ended[-1][0]

    def _divisor(self, length: int) -> np.float32:
        return np.float32(math.pow(length, self._params.length_penalty))

    def hypotheses(self) -> list[Hypothesis]:
        """Return the outputs, best first: `width` of them once the search is done, or fewer if no more exist."""
        found = list[Hypothesis]()
        for score, num_levels, (parent, last_id, _) in self._ended:
            ids = [last_id]  # from the last token to the first
            beam = parent
            for level in reversed(self.levels[:num_levels]):
                beam, token_id, _ = level.active[beam]
                ids.append(token_id)
            stop_id = None
            if last_id in self._stop_ids:
                stop_id = last_id
            found.append(Hypothesis(tuple(ids[::-1]), float(score), stop_id))
        return found


def draft_shape(params: SamplingParams, speculation: Speculation) -> tuple[int, int]:
    """Return the shape (width, depth) of the tree that a draft worker grows below the live beams of a search: the
    number of its nodes on each level, below all live beams together, and the number of levels.

    There are K levels, or fewer if max_draft_tokens leaves room for fewer. The result is (0, 0) if it does not leave
    room for one draft token per live beam.
    """
    assert params.beams is not None, "no beam search is asked for"
    width = params.beams.width
    max_draft_tokens = speculation.max_draft_tokens
    if max_draft_tokens < width:
        return 0, 0
    beams = min(DRAFT_BEAMS * width, max_draft_tokens)
    return beams, speculation.chain_len(max_draft_tokens // beams)


def level_to_proto(level: BeamLevel) -> pb.BeamLevel:
    """Return a level as a protobuf message."""
    message = pb.BeamLevel()
    for parent, token_id, total in level.active:
        message.parents.append(parent)
        message.ids.append(token_id)
        message.sums.append(total)
    for parent, token_id, total in level.ended:
        message.ended_parents.append(parent)
        message.ended_ids.append(token_id)
        message.ended_sums.append(total)
    return message


def levels_from_proto(messages: Sequence[pb.BeamLevel], vocab_size: int, num_before: int = 1) -> tuple[BeamLevel, ...]:
    """Return the levels of protobuf messages. Raises InvalidRequest if one continues a beam that the level before it
    lacks, or has lists of unequal length, too many entries, ids outside the vocabulary or NaN.

    num_before: number of live beams before the first level.
    """
    levels = list[BeamLevel]()
    for number, message in enumerate(messages):
        name = f"levels[{number}]"
        level = BeamLevel(
            _entries(name, message.parents, message.ids, message.sums, vocab_size),
            _entries(name, message.ended_parents, message.ended_ids, message.ended_sums, vocab_size),
        )
        if not all(parent < num_before for parent, _, _ in (*level.active, *level.ended)):
            raise InvalidRequest(f"{name} continues a beam that is not among {num_before}", param="levels")
        levels.append(level)
        num_before = len(level.active)
    return tuple(levels)


def _entries(
    name: str, parents: Sequence[int], ids: Sequence[int], sums: Sequence[float], vocab_size: int
) -> tuple[Entry, ...]:
    if not len(parents) == len(ids) == len(sums) <= MAX_CHOICES:
        raise InvalidRequest(
            f"{name} has {len(parents)} parents, {len(ids)} ids and {len(sums)} sums; as many of each, and at most "
            f"{MAX_CHOICES}, are allowed",
            param="levels",
        )
    check_token_ids(f"{name}.ids", ids, vocab_size)
    if any(math.isnan(total) for total in sums):
        raise InvalidRequest(f"{name} holds a sum of log-probs that is NaN", param="levels")
    return tuple(zip(parents, ids, sums, strict=True))
