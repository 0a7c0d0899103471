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

from outrider.engine.heads.loader import LoadedHead
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.paths.forward_path import NORMED
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
"""Of that text."""
MAX_PROBE_TAPS = 16
"""Hidden states that a target gives of a text at once, 34 MB at a width of 8192: a head that is tested on more asks
again."""
MIN_SCORE = -20.0
"""Log-probability that counts for a token that the head holds for less likely, or has no row for."""
LOSES_AT = 3.0
"""Standard errors by which another way has to be better, and by which a head has to know one position from another."""
OUTSIDE = -2
"""A tap that no target has."""


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
    return sorted(set(taps).union(*_shifts(taps, num_layers)))


def _shifts(taps: Sequence[int], num_layers: int) -> dict[tuple[int, ...], str]:
    """Return what other taps would be: all of them or one moved by a layer, two of them exchanged, and the last
    layer's output on the other side of the final norm.
    """
    taps = tuple(taps)
    found = {taps: "as configured"}

    def add(label: str, way: Sequence[int]) -> None:
        if all(NORMED <= tap <= num_layers for tap in way):
            found.setdefault(tuple(way), label)

    for by, where in ((-1, "lower"), (1, "higher")):
        add(f"reading one layer {where}", [_moved(tap, by) for tap in taps])
    for place, tap in enumerate(taps):
        others = {f"reading tap {tap + by} in place of {tap}": _moved(tap, by) for by in (-1, 1)}
        if tap == num_layers:
            others["reading after the final norm"] = NORMED
        if tap == NORMED:
            others["reading before the final norm"] = num_layers
        for label, other in others.items():
            add(label, [*taps[:place], other, *taps[place + 1 :]])
    for a, b in combinations(range(len(taps)), 2):
        swapped = list(taps)
        swapped[a], swapped[b] = taps[b], taps[a]
        add(f"with taps {taps[a]} and {taps[b]} exchanged", swapped)
    del found[taps]
    return found


def _moved(tap: int, by: int) -> int:
    """Return the hidden state of another layer, OUTSIDE where there is none."""
    return OUTSIDE if tap == NORMED or tap + by < 0 else tap + by


@torch.inference_mode()
def score_head(loaded: LoadedHead, seen: Seen) -> Outcome:
    """Score a head on a text; one of blocks with every token in a block of its own place, the tokens before given.

    Where its files leave something open, decide it by the step after its first. Takes memory of the runner's cache for
    as long as it runs. Raises OutOfBlocks. Call it on the engine thread.
    """
    _decide(loaded, seen)
    opening, network, facts = loaded.opening, loaded.network, loaded.network.facts
    others = [_way(loaded, seen, label, taps) for taps, label in _shifts(opening.spec.taps, loaded.num_layers).items()]
    if opening.output_norm is not None:
        tensors = {name: tensor for name, tensor in opening.tensors.items() if name != "output_norm"}
        bare = replace(loaded, opening=OpeningMap(replace(opening.spec, norms_output=False), tensors))
        others.append(_way(bare, seen, "with the norm of the rows left out"))
    for label, misread in network.misreadings():
        network.facts = misread
        try:
            others.append(_way(loaded, seen, label))
        finally:
            network.facts = facts
    return Outcome(_way(loaded, seen, "as configured"), others)


def text_logits(loaded: LoadedHead, seen: Seen, taps: Sequence[int] | None = None, ahead: int = 1) -> Tensor:
    """Return the logits [P, V] of what follows a text's second token and those behind. taps: others than the head's.
    ahead: 2 for the step behind that of a `CarryHead`.
    """
    states = [seen.taps[tap] for tap in taps or loaded.opening.spec.taps]
    features = loaded.opening(torch.stack(states, dim=1))  # [T, d]
    return loaded.network.score_text(loaded.runner, seen.token_ids, features, ahead)


def _decide(loaded: LoadedHead, seen: Seen) -> None:
    """Take, of what the files leave open, the value with which the second step is better."""
    network = loaded.network
    for name in loaded.undecided:
        before = network.facts
        as_read = _way(loaded, seen, name, ahead=2)
        network.facts = replace(before, **{name: not getattr(before, name)})
        turned = _way(loaded, seen, name, ahead=2)
        if _lead(turned.scores, as_read.scores) <= 0:
            network.facts = before


def _way(loaded: LoadedHead, seen: Seen, label: str, taps: Sequence[int] | None = None, ahead: int = 1) -> Way:
    """Compare the logits [P, V] after the text's positions with what the target says `ahead` tokens later."""
    logits = text_logits(loaded, seen, taps, ahead)
    best = seen.best_ids[ahead : ahead + len(logits)].to(logits.device)
    said = torch.stack([best, best.roll(len(best) // 2)], dim=1)  # [P, 2]
    scores, elsewhere = logits.log_softmax(-1).gather(1, said).clamp(min=MIN_SCORE).cpu().unbind(1)
    return Way(label, scores, elsewhere, float((logits.argmax(-1) == best).float().mean()))
