"""Beam search as such: which beams go on and which have ended, by sums of log-probs. Pure: no model, no torch, no I/O.

It is the search of transformers' `generate`: a step looks at the best continuations of all live beams together. Of its
best `width` those that end, by a stop id or at max_tokens, are hypotheses, scored by their sum over length **
length_penalty; the best `width` that do not end are the live beams of the next step, so that a beam that ends takes no
place of a live one. Sums and scores are float32 there and here.

A step decides a `Level`. All live beams have one length, so that a level is to a beam search what a token is to an
output: it has a position, and it is never taken back.
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
"""Beams of a draft for each live one: a level helps only where all live beams are among them, so that width goes before
depth. With about 32 draft tokens the demo pair decides 1.6 levels a step at 2, 1.8 at 3 and 1.9 at 4 for 4 live beams,
and 1.3, 1.4 and 1.5 for 8."""

Entry = tuple[int, int, float]
"""(index of the beam that is continued, its token, the sum of log-probs with it, in nats)."""


@dataclass(frozen=True, slots=True)
class Level:
    """What one step decided, each list best first."""

    live: tuple[Entry, ...]
    """Beams that go on; none at max_tokens."""
    ended: tuple[Entry, ...]
    """Hypotheses that ended, by a token of their own."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer of the search."""

    ids: tuple[int, ...]
    """What follows the prompt; a stop id is the last."""
    score: float
    """Sum of log-probs over length ** length_penalty."""
    stop_id: int | None
    """None where max_tokens ended it."""


class BeamSearch:
    """One search, level by level, until it `is_done`."""

    def __init__(self, params: BeamParams, max_tokens: int, stop_ids: Set[int]) -> None:
        self.levels: list[Level] = []
        self.sums: tuple[float, ...] = (0.0,)
        """Of the live beams, best first. Before the first level there is one, the prompt."""
        self.is_done = False
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._ended: list[tuple[np.float32, int, Entry]] = []
        """The best `width` hypotheses, best first: the score, the number of levels before the last token, and that."""

    @property
    def num_candidates(self) -> int:
        """Number of its best continuations that `choose` has to know of each live beam: all that go on may be of one,
        and come after its stop ids.
        """
        return self._params.width + len(self._stop_ids)

    def choose(self, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> Level:
        """Return the next level. ids, log_probs: [live beams, n], the best continuations of each, best first; n is
        num_candidates, or the vocabulary where that is less.
        """
        width, is_last = self._params.width, len(self.levels) + 1 >= self._max_tokens
        sums = log_probs + np.array(self.sums, dtype=np.float32)[:, None]  # [live beams, n] float32
        order = np.argsort(-sums, axis=None, kind="stable")
        live, ended = list[Entry](), list[Entry]()
        for rank, place in enumerate(order.tolist()):
            if rank >= width and len(live) == width:
                break
            parent, at = divmod(place, sums.shape[1])
            entry = (parent, int(ids[parent, at]), float(sums[parent, at]))
            if is_last or entry[1] in self._stop_ids:
                if rank < width:
                    ended.append(entry)
                elif is_last:
                    break
            elif len(live) < width:
                live.append(entry)
        return Level(tuple(live), tuple(ended))

    def apply(self, level: Level) -> None:
        """Take in a level that `choose` returned, here or elsewhere."""
        num_levels = len(self.levels)
        self.levels.append(level)
        self.sums = tuple(total for _, _, total in level.live)
        divisor = self._divisor(num_levels + 1)
        for entry in level.ended:
            self._ended.append((np.float32(entry[2]) / divisor, num_levels, entry))
        self._ended.sort(key=lambda ended: -ended[0])
        del self._ended[self._params.width :]
        self.is_done = not level.live or self._cannot_improve()

    def _cannot_improve(self) -> bool:
        """Return whether transformers would stop here: by its heuristic no live beam gets better than the worst
        hypothesis.
        """
        params = self._params
        if len(self._ended) < params.width:
            return False
        if params.early_stopping is EarlyStopping.TRUE:
            return True
        is_longest_best = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0.0
        best = np.float32(self.sums[0]) / self._divisor(self._max_tokens if is_longest_best else len(self.levels))
        return not best > self._ended[-1][0]

    def _divisor(self, length: int) -> np.float32:
        return np.float32(math.pow(length, self._params.length_penalty))

    def hypotheses(self) -> list[Hypothesis]:
        """Return the answers, best first: `width` of them once it is done, fewer where there are no more tokens."""
        found = list[Hypothesis]()
        for score, num_levels, (parent, last_id, _) in self._ended:
            ids, at = [last_id], parent
            for level in reversed(self.levels[:num_levels]):
                at, token_id, _ = level.live[at]
                ids.append(token_id)
            stop_id = last_id if last_id in self._stop_ids else None
            found.append(Hypothesis(tuple(ids[::-1]), float(score), stop_id))
        return found


def draft_shape(params: SamplingParams, speculation: Speculation) -> tuple[int, int]:
    """Return (beams, levels) of what a draft grows under the live beams: K levels, or as many as max_draft_tokens leave
    room for. (0, 0) where there is no room for all live beams.
    """
    assert params.beams is not None, "no beam search is asked for"
    width = params.beams.width
    max_draft_tokens = speculation.max_draft_tokens
    if max_draft_tokens < width:
        return 0, 0
    beams = min(DRAFT_BEAMS * width, max_draft_tokens)
    return beams, speculation.chain_len(max_draft_tokens // beams)


def level_to_proto(level: Level) -> pb.BeamLevel:
    message = pb.BeamLevel()
    for parent, token_id, total in level.live:
        message.parents.append(parent)
        message.ids.append(token_id)
        message.sums.append(total)
    for parent, token_id, total in level.ended:
        message.ended_parents.append(parent)
        message.ended_ids.append(token_id)
        message.ended_sums.append(total)
    return message


def levels_from_proto(messages: Sequence[pb.BeamLevel], vocab_size: int, num_before: int = 1) -> tuple[Level, ...]:
    """Read levels, and check that each names beams of the one before. num_before: live beams before the first. Raises
    InvalidRequest.
    """
    levels = list[Level]()
    for number, message in enumerate(messages):
        name = f"levels[{number}]"
        level = Level(
            _entries(name, message.parents, message.ids, message.sums, vocab_size),
            _entries(name, message.ended_parents, message.ended_ids, message.ended_sums, vocab_size),
        )
        if not all(parent < num_before for parent, _, _ in (*level.live, *level.ended)):
            raise InvalidRequest(f"{name} continues a beam that is not among {num_before}", param="levels")
        levels.append(level)
        num_before = len(level.live)
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
