"""What a step verified and why it went no further, for slots that ask. Made after the decision, of which it changes
nothing: it draws nothing, and reads the logits once more, of one row of each such slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw, exactly_best
from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree
from outrider.engine.speculation.nodes import NodeKind
from outrider.wire.drafters import Drafter
from outrider.wire.kinds import DraftTokenKind
from target_service.decide_on_device import Decided
from target_service.jobs import Explanation, Ranked, Rejection
from target_service.lease import Delivered, Ready
from target_service.parked import ParkedNode

NUM_BEST = 5
"""Most tokens that are told of a place. It is the protocol's."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A slot that asks, and what was decided on it."""

    ready: Ready
    state: SamplingState
    decided: Decided
    start: int
    """Its first row among the step's logits."""

    @property
    def last(self) -> int:
        """Return the last accepted node, or ROOT."""
        if self.ready.tree is None:
            return self.decided.num_accepted - 1
        return self.decided.path[-1] if self.decided.path else ROOT


def explain(asking: Sequence[Asking], logits: Tensor) -> list[Explanation]:
    """Explain each decision, before anything of it is committed. logits: [sum(K_b + 1), V] float32 of the step, where
    they are; the rows that are told of are copied to the host at once.
    """
    trees = [_tree(each.ready) for each in asking]
    ended = [_is_refused(each, tree) for each, tree in zip(asking, trees, strict=True)]
    rows = [each.start + 1 + each.last for each, is_refused in zip(asking, ended, strict=True) if is_refused]
    host = HostLogits(logits[to_device(np.array(rows, dtype=np.int64), logits.device)])
    places = iter(range(len(rows)))
    return [
        _explanation(each, tree, _target_best(each, tree, host, next(places)) if is_refused else None)
        for each, tree, is_refused in zip(asking, trees, ended, strict=True)
    ]


def _tree(ready: Ready) -> DraftTree:
    return ready.tree or DraftTree(tuple(ready.draft_ids), tuple(ready.parents))


def _is_refused(asking: Asking, tree: DraftTree) -> bool:
    """Return whether draft tokens follow the last accepted one, none of which is what came."""
    return bool(tree.children(asking.last)) and tree.child(asking.last, asking.decided.next_id) is None


def _target_best(asking: Asking, tree: DraftTree, host: HostLogits, place: int) -> list[Ranked]:
    row = LogitRow(asking.state, tree.prefix(asking.last))
    if asking.state.params.greedy:
        ids, probs = host.ranked(place, row, NUM_BEST)
        return [(token_id, math.log(prob)) for token_id, prob in zip(ids, probs, strict=True) if prob > 0.0]
    return best_of(host.law(place, row))


def best_of(law: RowLaw) -> list[Ranked]:
    """Return the likeliest ids of a law with their log-probs, best first and the lowest first among equals."""
    places = exactly_best(law.scores, min(NUM_BEST, law.scores.size))
    places = places[np.argsort(-law.scores[places], kind="stable")]
    probs = law.probs()[places].tolist()
    return [(law.id_of(int(at)), math.log(prob)) for at, prob in zip(places, probs, strict=True) if prob > 0.0]


def _explanation(asking: Asking, tree: DraftTree, target: Sequence[Ranked] | None) -> Explanation:
    r, last = asking.ready, asking.last
    rejection = None
    if target is not None:
        law = _draft_law(r, last)
        guesses = _guesses(r, tree, last) if law is None else ()
        rejection = Rejection(last, asking.decided.next_id, target, () if law is None else best_of(law), guesses)
    accepted = () if last == ROOT else tree.paths[last]
    kinds = [_kind(r, node) for node in range(len(tree.ids))]
    return Explanation(tree.ids, tree.parents, kinds, accepted, rejection, _draft_us(r))


def _kind(r: Ready, node: int) -> DraftTokenKind:
    if r.drafter is None:
        return DraftTokenKind.FORCED
    if r.drafter is Drafter.PREDICTION:
        return DraftTokenKind.PREDICTED
    said = (source.drafts[node] for source in r.sources if node in source.drafts)
    return DraftTokenKind.DRAWN if any(each.kind is NodeKind.LAW for each in said) else DraftTokenKind.GUESS


def _draft_law(r: Ready, last: int) -> RowLaw | None:
    """Return what was drawn from after the last accepted node, by the first that had a choice; a table had none: its
    law is of one token. None where nothing was drawn.
    """
    if r.tree is not None:
        laws = [each.law for each in r.drawn.get(last, ())]
    else:
        is_drawn = r.draft_laws is not None and _kind(r, last + 1) is DraftTokenKind.DRAWN
        laws = [r.draft_laws[last + 1]] if is_drawn and r.draft_laws is not None else []
    return next((law for law in laws if law.scores.size > 1), laws[0] if laws else None)


def _guesses(r: Ready, tree: DraftTree, last: int) -> Sequence[int]:
    """Return what was guessed there, verified or not, by the first whose guess was."""
    verified = tree.children(last)
    for source in r.sources:
        mine = [node for node in verified if node in source.drafts]
        if mine and isinstance(source.whose, Delivered):
            return source.whose.parked.guesses_after(tree.prefix(last))[:NUM_BEST]
        if mine:
            return [tree.ids[node] for node in sorted(mine, key=source.ranks.__getitem__)][:NUM_BEST]
    return [tree.ids[node] for node in verified][:NUM_BEST]


def _draft_us(r: Ready) -> int | None:
    """Return what draft workers say that this took, in microseconds: each delivery tells once, of the step that first
    verifies something of it.
    """
    spent = {
        id(draft.spent): draft.spent
        for source in r.sources
        for draft in source.drafts.values()
        if isinstance(draft, ParkedNode) and draft.spent is not None
    }
    return sum(each.take_us() for each in spent.values()) if spent else None
