"""Test whether a head reads the hidden states on which it was trained, by its predictions of a text.

A head that reads hidden states one layer off, or from the wrong side of a norm, drafts fluently. Its draft tokens are
rejected more often, and nothing else shows it. So the head's predictions of a text are scored as its files are read,
and in the known ways to misread them. If another way predicts the target clearly better, the files are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.head_loader import LoadedHead
from outrider.engine.heads.projection import Projection
from outrider.wire.telemetry.log import get_logger

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
"""Text on which heads are tested by default: code and prose, as in the training data of most models."""
MAX_TOKENS = 128
"""Maximum length, in tokens, of the text on which the wiring of a head is tested."""
MAX_PROBE_TAPS = 16
"""Maximum number of taps whose hidden states over the test's text a target sends in one reply: 34 MB at width 8192."""
MIN_SCORE = -20.0
"""Lowest log-probability that counts in the wiring test. Lower ones are raised to it, also that of a token for which
the head's lm_head has no row."""
MIN_LEAD = 3.0
"""Difference of two mean scores, in standard errors, above which it counts as more than chance. It decides between two
wirings of a head, and between a head's scores at the right positions and at other ones."""


@dataclass(frozen=True, slots=True)
class ProbeStates:
    """Hidden states and predictions of a target over a text of T tokens."""

    token_ids: Sequence[int]
    taps: Mapping[int, Tensor]
    """Hidden states [T, dt] by tap, the index of the hidden state."""
    best_ids: Tensor
    """[T] int64, the target's most likely next token after each token."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """One way to wire a head (which hidden states it reads, and how), with its scores on a text."""

    label: str
    scores: Tensor
    """[P] log-probabilities that the head gives to the target's most likely token, one for each of P positions."""
    shifted_scores: Tensor
    """[P] log-probabilities that the head gives, at each position, to the target's most likely token at another
    position, half the text away. A head that predicts nothing has `scores` no better than these."""
    agreement: float
    """Fraction of positions, 0 to 1, at which the head's most likely token equals the target's most likely token."""

    @property
    def is_predictive(self) -> bool:
        """Whether the head's predictions fit the target's tokens at their positions better than those half the text
        away (`scores` above `shifted_scores`), by more than chance.
        """
        return _lead(self.scores, self.shifted_scores) > MIN_LEAD


@dataclass(frozen=True, slots=True)
class WiringScores:
    """Scores of a head on a text: wired as in its files, and in other ways."""

    configured: Wiring
    others: Sequence[Wiring]

    @property
    def best_other(self) -> Wiring | None:
        """The best of the other wirings that are predictive (`is_predictive`) and score better than the wiring in the
        head's files, by more than chance; None if there is none.
        """
        ours = self.configured.scores
        better = list[Wiring]()
        for way in self.others:
            if way.is_predictive and _lead(way.scores, ours) > MIN_LEAD:
                better.append(way)
        return max(better, key=lambda way: float(way.scores.mean()), default=None)

    @property
    def fault(self) -> str | None:
        """Description of the fault in the wiring of the head's files; None if the test found none."""
        ours, winner = self.configured, self.best_other
        agreement = f"it agrees with the target at {ours.agreement:.0%} of {len(ours.scores)} positions"
        if winner is not None:
            return f"{agreement}, and {winner.label} at {winner.agreement:.0%}"
        if not ours.is_predictive:
            return (
                f"{agreement}, and predicts the token at each no better than those elsewhere; is it hardly trained, or "
                "another target's?"
            )
        return None


def _lead(scores: Tensor, others: Tensor) -> float:
    differences = (scores - others).double()
    return float(differences.mean() / differences.std()) * math.sqrt(len(differences))


def probe_ids(tokenizer_json: bytes, context_limit: int, text: str = TEXT) -> list[int]:
    """Return the token ids of the text on which a head is tested, cut to the context limit and to `MAX_TOKENS`.
    `tokenizer_json`: contents of the tokenizer.json.
    """
    return Tokenizer.from_str(tokenizer_json.decode()).encode(text).ids[: min(MAX_TOKENS, context_limit)]


def judge(outcome: WiringScores, model: str, *, trusts: bool) -> str | None:
    """Log the scores of a head in the wiring test. Return the reason why the head is refused; None = it is served.

    `model`: the head's name in the log. `trusts`: whether a fault is only logged, and the head is served with the
    wiring in its files.
    """
    ours, fault = outcome.configured, outcome.fault
    ways = ", ".join(f"{way.label} {way.agreement:.0%}" for way in (ours, *outcome.others))
    log.info("%s agrees with the target at %d positions: %s", model, len(ours.scores), ways)
    if fault is None:
        return None
    if trusts:
        log.warning("the head %s is served as its configuration says, as set, though %s", model, fault)
        return None
    return (
        f"the head does not fit: {fault}; mend its config.json, or serve it as it is with trust_draft_config "
        "(OUTRIDER_DRAFT_TRUST_DRAFT_CONFIG=true)"
    )


def taps_to_probe(taps: Sequence[int], num_layers: int) -> list[int]:
    """Return the sorted indices of all hidden states that the wiring test of a head with these taps reads: `taps`, and
    the hidden states that a head with wrongly stated taps may read instead.
    """
    return sorted(set(taps).union(*_misread_taps(taps, num_layers)))


def _misread_taps(taps: Sequence[int], num_layers: int) -> list[tuple[int, ...]]:
    """Return other taps: all or one of these moved by one hidden state, or two of them exchanged.

    The hidden state after the final norm counts as the one after the last layer's output.

    taps (2, 5): (1, 4), (3, 6); (1, 5), (2, 4), (3, 5), (2, 6); (5, 2)
    """
    states = [*range(num_layers + 1), NORMED]
    places = [states.index(tap) for tap in taps]
    ways = list[list[int]]()
    for by in (-1, 1):
        ways.append([place + by for place in places])
        for index, place in enumerate(places):
            ways.append([*places[:index], place + by, *places[index + 1 :]])
    for a, b in combinations(range(len(places)), 2):
        swapped = list(places)
        swapped[a], swapped[b] = places[b], places[a]
        ways.append(swapped)
    found = set[tuple[int, ...]]()
    for way in ways:
        if way != places and min(way) >= 0 and max(way) < len(states):
            found.add(tuple(states[place] for place in way))
    return sorted(found)


@torch.inference_mode()
def score_head(loaded: LoadedHead, seen: ProbeStates) -> WiringScores:
    """Return how well a head predicts a text with the wiring in its files, and with other wirings, such as the hidden
    states of other layers, that it may have in truth if the files are wrong.

    Before that, for each boolean of its configuration that the files do not state, both values are tried, and the
    better one is set in `loaded.network`. `seen`: the target's hidden states and predictions over the text. Raises
    `OutOfBlocks` if the KV cache of the head's runner has too few free blocks for the text. Call it on the engine
    thread.
    """
    _decide(loaded, seen)
    projection = loaded.projection
    network = loaded.network
    facts = network.facts
    others = list[Wiring]()
    for taps in _misread_taps(projection.spec.taps, loaded.num_layers):
        others.append(_way(loaded, seen, f"reading the hidden states {list(taps)} ({NORMED} = normed)", taps))
    if projection.spec.norms_output:
        bare = replace(loaded, projection=Projection(replace(projection.spec, norms_output=False), projection.tensors))
        others.append(_way(bare, seen, "with the norm of the rows left out"))
    for label, misread in network.misreadings():
        network.facts = misread
        try:
            others.append(_way(loaded, seen, label))
        finally:
            network.facts = facts
    return WiringScores(_way(loaded, seen, "as configured"), others)


def text_logits(loaded: LoadedHead, seen: ProbeStates, taps: Sequence[int] | None = None, ahead: int = 1) -> Tensor:
    """Return the head's logits [P, V] that predict P tokens of the test's text, each from the tokens before it.

    `seen`: the target's hidden states over the text. `taps`: indices of the hidden states to read; None = the taps that
    the head's files state. `ahead`: 1 = the logits of the first draft step, from the third token on; 2 = the logits of
    a `CarryHead`'s second draft step, in which it reads its own output, from the fourth token on.
    """
    states = [seen.taps[tap] for tap in taps or loaded.projection.spec.taps]
    features = loaded.projection(torch.stack(states, dim=1))  # [T, d]
    return loaded.network.score_text(loaded.runner, seen.token_ids, features, ahead)


def _decide(loaded: LoadedHead, seen: ProbeStates) -> None:
    network = loaded.network
    for name in loaded.undecided:
        before = network.facts
        as_read = _way(loaded, seen, name, ahead=2)
        network.facts = replace(before, **{name: not getattr(before, name)})
        turned = _way(loaded, seen, name, ahead=2)
        if not _lead(turned.scores, as_read.scores) > 0:  # also where the value makes no difference
            network.facts = before


def _way(
    loaded: LoadedHead, seen: ProbeStates, label: str, taps: Sequence[int] | None = None, ahead: int = 1
) -> Wiring:
    logits = text_logits(loaded, seen, taps, ahead)
    best = seen.best_ids[ahead : ahead + len(logits)].to(logits.device)
    tokens = torch.stack([best, best.roll(len(best) // 2)], dim=1)  # [P, 2]
    scores, elsewhere = logits.log_softmax(-1).gather(1, tokens).clamp(min=MIN_SCORE).cpu().unbind(1)
    return Wiring(label, scores, elsewhere, float((logits.argmax(-1) == best).float().mean()))
