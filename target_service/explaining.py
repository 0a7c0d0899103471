"""What a step verified and why it went no further, for slots that ask. Made after the decision, of which it changes
nothing: it draws nothing, and reads the logits once more, of one row of each such slot. No worker reads what is made
here, so it is the message that the user's answer carries.
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
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import Drafter
from target_service.decide_on_device import Decided
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


def explain(asking: Sequence[Asking], logits: Tensor) -> list[pb.Explanation]:
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


def _target_best(asking: Asking, tree: DraftTree, host: HostLogits, place: int) -> list[pb.RankedToken]:
    row = LogitRow(asking.state, tree.prefix(asking.last))
    if asking.state.params.greedy:
        ids, probs = host.ranked(place, row, NUM_BEST)
        return _ranked(ids, probs)
    return best_of(host.law(place, row))


def best_of(law: RowLaw) -> list[pb.RankedToken]:
    """Return the likeliest ids of a law with their log-probs, best first and the lowest first among equals."""
    places = exactly_best(law.scores, min(NUM_BEST, law.scores.size))
    places = places[np.argsort(-law.scores[places], kind="stable")]
    return _ranked([law.id_of(int(at)) for at in places], law.probs()[places].tolist())


def _ranked(ids: Sequence[int], probs: Sequence[float]) -> list[pb.RankedToken]:
    found = list[pb.RankedToken]()
    for token_id, prob in zip(ids, probs, strict=True):
        if prob > 0.0:
            found.append(pb.RankedToken(id=token_id, logprob=math.log(prob)))
    return found


def _explanation(asking: Asking, tree: DraftTree, target: Sequence[pb.RankedToken] | None) -> pb.Explanation:
    """target: its best tokens where the path of accepted ones ended with one refused."""
    r, last = asking.ready, asking.last
    accepted = () if last == ROOT else tree.paths[last]
    explanation = pb.Explanation(draft_us=_draft_us(r))
    for node, (token_id, parent) in enumerate(zip(tree.ids, tree.parents, strict=True)):
        explanation.draft.add(id=token_id, parent=parent, kind=_kind(r, node), accepted=node in accepted)
    if target is not None:
        rejection = explanation.rejection
        rejection.parent = last
        rejection.token.id = asking.decided.next_id
        rejection.target.extend(target)
        law = _draft_law(r, last)
        if law is not None:
            rejection.draft_law.extend(best_of(law))
        else:
            for token_id in _guesses(r, tree, last):
                rejection.draft_guesses.add(id=token_id)
    return explanation


def _kind(r: Ready, node: int) -> pb.DraftTokenKind:
    if r.drafter is None:
        return pb.DRAFT_TOKEN_KIND_FORCED
    if r.drafter is Drafter.PREDICTION:
        return pb.DRAFT_TOKEN_KIND_PREDICTED
    for source in r.sources:
        if node in source.drafts and source.drafts[node].kind is NodeKind.LAW:
            return pb.DRAFT_TOKEN_KIND_DRAWN
    return pb.DRAFT_TOKEN_KIND_GUESS


def _draft_law(r: Ready, last: int) -> RowLaw | None:
    """Return what was drawn from after the last accepted node, by the first that had a choice; a table had none: its
    law is of one token. None where nothing was drawn.
    """
    if r.tree is not None:
        laws = [each.law for each in r.drawn.get(last, ())]
    else:
        is_drawn = r.draft_laws is not None and _kind(r, last + 1) == pb.DRAFT_TOKEN_KIND_DRAWN
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
