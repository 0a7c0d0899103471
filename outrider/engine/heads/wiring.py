"""Tests that a head reads the hidden states that it was trained on, by what it then says of a text.

A head that reads them one layer off, or before a norm that it was trained behind, drafts fluently, and its drafts are
refused more often; nothing else shows it. So a text's positions are scored as the files say, and in the ways in which
files are misread: a way that explains the target better than the files' own means that these are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.engine.heads.block_path import BlockHeadPath
from outrider.engine.heads.block_run import said_of_text
from outrider.engine.heads.loader import LoadedHead, LoadedMedusa
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.paths.forward_path import NORMED
from outrider.engine.step_plan import Row
from outrider.wire.log import get_logger

log = get_logger(__name__)

TEXT = '''def average(values):
    """Return the arithmetic mean of a list of numbers.

    An empty list has no mean, and a ValueError is raised for it.
    """
    if not values:
        raise ValueError("the list is empty")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


The first thing that a reader of a long report wants to know is what was done, why it was done, and what came of it. The
second is what it means for the work of the next few weeks.
'''
"""What heads are tested on unless a test has a text of its own: code and prose that any model has seen the like of."""
MAX_TOKENS = 128
"""Of that text. Doubling it makes the test twice as long, and shows what is half as large."""
MAX_PROBE_TAPS = 16
"""Hidden states that a target gives of a text at once: a head that is tested on more asks again. Doubling it doubles
the largest answer, 34 MB at a width of 8192."""
LEAST_SCORE = -20.0
"""What counts for a token that the head holds for less likely, or has no row for. Doubling it lets one token decide."""
LOSES_AT = 3.0
"""Standard errors by which another way has to be better, and by which a head has to know one position from another.
Doubling it lets heads pass that are off by less, and refuses heads that know half as much."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a target says of a text of T tokens."""

    token_ids: Sequence[int]
    taps: Mapping[int, Tensor]
    """Hidden states [T, dt] by tap."""
    best_ids: Tensor
    """[T] int64, the likeliest token after each."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to wire a head, and what comes of it."""

    label: str
    scores: Tensor
    """[P] log-probabilities that the head gives to what the target says at each position."""
    elsewhere: Tensor
    """[P] log-probabilities that it gives to what the target says half the text away."""
    agreement: float
    """Share of positions where both say the same."""

    @property
    def foretells(self) -> bool:
        """Whether it says better what comes at a position than what comes elsewhere, by more than chance."""
        return _lead(self.scores, self.elsewhere) > LOSES_AT


@dataclass(frozen=True, slots=True)
class Outcome:
    """The files' own way beside others."""

    configured: Way
    others: Sequence[Way]

    @property
    def winner(self) -> Way | None:
        """Return the best of the others that foretell anything and beat the files' own by more than chance."""
        ours = self.configured.scores
        better = [way for way in self.others if way.foretells and _lead(way.scores, ours) > LOSES_AT]
        return max(better, key=lambda way: float(way.scores.mean()), default=None)

    @property
    def fault(self) -> str | None:
        """Return what is wrong with the wiring; None where nothing is."""
        ours, winner = self.configured, self.winner
        if winner is not None:
            return (
                f"{winner.label} it agrees with the target at {winner.agreement:.0%} of {len(ours.scores)} positions, "
                f"and as configured at {ours.agreement:.0%}"
            )
        if not ours.foretells:
            return (
                f"it agrees with the target at {ours.agreement:.0%} of {len(ours.scores)} positions, and foretells "
                "what comes at each no better than what comes elsewhere; is it hardly trained, or another target's?"
            )
        return None


def _lead(scores: Tensor, others: Tensor) -> float:
    """Return by how many standard errors the mean of scores [P] is above that of others, position by position."""
    differences = (scores - others).double()
    error = float(differences.std()) / math.sqrt(len(differences))
    mean = float(differences.mean())
    return mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0


def probe_ids(tokenizer_json: bytes, context_limit: int, text: str = TEXT) -> list[int]:
    """Return the ids of the text that a head is tested on, as many as fit the context."""
    return Tokenizer.from_str(tokenizer_json.decode()).encode(text).ids[: min(MAX_TOKENS, context_limit)]


def judge(outcome: Outcome, model: str, *, trusts: bool) -> str | None:
    """Return why a head is not to be served, None where it is. What was seen is logged.

    trusts: its configuration is served whatever was seen.
    """
    ours, fault = outcome.configured, outcome.fault
    ways = ", ".join(f"{way.label} {way.agreement:.0%}" for way in (ours, *outcome.others))
    log.info("%s agrees with the target at %d positions: %s", model, len(ours.scores), ways)
    if fault is not None and trusts:
        log.warning("the head %s is served as its configuration says, as set, though %s", model, fault)
    if fault is None or trusts:
        return None
    return (
        f"the head does not fit: {fault}; mend its config.json, or serve it as it is with trust_draft_config "
        "(OUTRIDER_DRAFT_TRUST_DRAFT_CONFIG=true)"
    )


def taps_to_probe(taps: Sequence[int], num_layers: int) -> list[int]:
    """Return the hidden states that a test of a head with these taps needs."""
    return sorted({tap for ways in (taps, *(shifted for _, shifted in _shifts(taps, num_layers))) for tap in ways})


def _shifts(taps: Sequence[int], num_layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return other taps by what they would be: all of them or one moved by a layer, two of them exchanged, and the last
    layer's output on the other side of the final norm.
    """

    def moved(tap: int, by: int) -> int | None:
        return tap + by if tap != NORMED and 0 <= tap + by <= num_layers else None

    taps = tuple(taps)
    found: dict[tuple[int | None, ...], str] = {taps: "as configured"}
    for by, where in ((-1, "lower"), (1, "higher")):
        found.setdefault(tuple(moved(tap, by) for tap in taps), f"reading one layer {where}")
    for place, tap in enumerate(taps):
        ways = {moved(tap, by): f"reading tap {tap + by} in place of {tap}" for by in (-1, 1)}
        ways |= {NORMED: "reading after the final norm"} if tap == num_layers else {}
        ways |= {num_layers: "reading before the final norm"} if tap == NORMED else {}
        for other, label in ways.items():
            found.setdefault((*taps[:place], other, *taps[place + 1 :]), label)
    for a, b in combinations(range(len(taps)), 2):
        swapped = list(taps)
        swapped[a], swapped[b] = taps[b], taps[a]
        found.setdefault(tuple(swapped), f"with taps {taps[a]} and {taps[b]} exchanged")
    del found[taps]
    return [
        (label, way)
        for some, label in found.items()
        if len(way := tuple(t for t in some if t is not None)) == len(taps)
    ]


@torch.inference_mode()
def score_head(loaded: LoadedHead, seen: Seen, num_layers: int) -> Outcome:
    """Score a head on a text; one of blocks with every token in a block of its own place, the tokens before given.

    Where its files leave something open, decide it by the step after its first. Takes memory of the runner's cache for
    as long as it runs. Raises OutOfBlocks. Call it on the engine thread.
    """
    if loaded.undecided:
        _decide(loaded, seen)
    taps = loaded.opening.spec.taps

    def way(label: str, taps: Sequence[int], loaded: LoadedHead = loaded) -> Way:
        return _way(label, _first(loaded, seen, taps), seen, 1)

    others = [way(label, shifted) for label, shifted in _shifts(taps, num_layers)]
    if loaded.opening.output_norm is not None:
        others.append(
            way("with the norm of the rows left out", taps, replace(loaded, opening=_unnormed(loaded.opening)))
        )
    for label, misread in loaded.head.misreadings():
        with misread:
            others.append(way(label, taps))
    return Outcome(way("as configured", taps), others)


def _first(loaded: LoadedHead, seen: Seen, taps: Sequence[int]) -> Tensor:
    """Return the logits [P, V] of what follows a text's second token and those behind."""
    if isinstance(loaded.path, BlockHeadPath):
        return said_of_text(loaded.runner, loaded.path, seen.token_ids, _rows(loaded, seen, taps))
    return _HeadRun(loaded, seen, taps).first


def _rows(loaded: LoadedHead, seen: Seen, taps: Sequence[int]) -> Tensor:
    """Return the rows [T, d] of a text with some taps."""
    return loaded.opening(torch.stack([seen.taps[tap] for tap in taps], dim=1))


def _unnormed(opening: OpeningMap) -> OpeningMap:
    spec = replace(opening.spec, norms_output=False)
    return OpeningMap(spec, {name: t for name, t in opening.tensors.items() if name != "output_norm"})


@torch.inference_mode()
def score_medusa(loaded: LoadedMedusa, seen: Seen, num_layers: int) -> Outcome:
    """Score the first of Medusa's heads on a text, which says the token behind the next."""

    def way(label: str, tap: int) -> Way:
        logits = loaded.heads(seen.taps[tap][:-1].to(torch.bfloat16))[:, 0]  # [T - 1, V]
        return _way(label, logits, seen, 1)

    (tap,) = loaded.opening.spec.taps
    others = [way(label, other) for label, (other,) in _shifts((tap,), num_layers)]
    return Outcome(way("as configured", tap), others)


class _HeadRun:
    """A head over a text with some taps: its logits [T - 1, V] at each entry, and those of the next step."""

    def __init__(self, loaded: LoadedHead, seen: Seen, taps: Sequence[int]) -> None:
        self._loaded, self._ids = loaded, list(seen.token_ids[1:])
        self._features = _rows(loaded, seen, taps)[:-1]
        self.first = self._run(second=False)

    def second(self) -> Tensor:
        """Return the logits [T - 2, V] two tokens after each entry: after its next token, with the head's own carry as
        its feature, or of a head that fills masks after a mask.
        """
        return self._run(second=True)

    def _run(self, *, second: bool) -> Tensor:
        runner, num = self._loaded.runner, len(self._ids)
        table = runner.pool.new_table()
        try:
            logits = runner.forward([Row(table, self._ids, 0, num, (), features=self._features)])
            if not second:
                return logits
            path, mask, parents = self._loaded.path, self._loaded.mask, [*range(-1, num - 1), *range(num - 1)]
            assert not isinstance(path, BlockHeadPath), "nothing is carried from block to block"
            ids, features = self._ids[1:], path.carries[:-1]
            if mask is not None:
                ids, features = [mask.token_id] * (num - 1), mask.feature.expand(num - 1, -1)
            branches = Row(table, ids, num, num - 1, self._ids, parents, features)
            return runner.forward([branches])
        finally:
            table.free()


def _decide(loaded: LoadedHead, seen: Seen) -> None:
    """Take, of what the files leave open, the value with which the second step is better."""
    for name in loaded.undecided:
        before = loaded.head.facts
        after = replace(before, **{name: not getattr(before, name)})
        ways: list[Way] = []
        for facts in (before, after):
            loaded.head.decide(facts)
            logits = _HeadRun(loaded, seen, loaded.opening.spec.taps).second()
            ways.append(_way(name, logits, seen, 2))
        loaded.head.decide(after if _lead(ways[1].scores, ways[0].scores) > 0 else before)


def _way(label: str, logits: Tensor, seen: Seen, ahead: int) -> Way:
    """Compare logits [P, V], after as many of the text's positions, with what the target says `ahead` tokens later."""
    best = seen.best_ids[ahead : ahead + len(logits)].to(logits.device)
    said = torch.stack([best, best.roll(len(best) // 2)], dim=1)  # [P, 2]
    scores, elsewhere = logits.log_softmax(-1).gather(1, said).clamp(min=LEAST_SCORE).cpu().unbind(1)
    return Way(label, scores, elsewhere, float((logits.argmax(-1) == best).float().mean()))
