"""What a step verified and why it went no further, for slots that ask. Made after the decision, of which it changes
nothing: it draws nothing, and reads the logits once more, of one row of each such slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw, exactly_best
from outrider.engine.speculation.nodes import NodeKind
from outrider.wire.kinds import Drafter, DraftTokenKind
from target_service.jobs import Explanation, Ranked, Rejection
from target_service.lease import Delivered, Ready
from target_service.parked import ParkedNode
from target_service.proposal import Proposal
from target_service.step_rows import Decided

NUM_BEST = 5
"""Most tokens that are reported of a place. It is the protocol's."""


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """A slot whose step is explained."""

    proposal: Proposal
    state: SamplingState
    decided: Decided
    start: int
    """Its first row among the step's logits."""
    kinds: Sequence[DraftTokenKind]
    """Of each node."""
    proposed_after: Callable[[int], Sequence[int]]
    """Returns the tokens that were proposed after a node or ROOT, verified or not, best first."""
    draft_us: int | None = None
    """What draft workers spent on the proposal, in microseconds; None where none drafted or said."""

    @property
    def is_rejection(self) -> bool:
        """Return whether draft tokens follow the last accepted one, none of which is what came."""
        tree, last = self.proposal.tree, self.decided.last
        return bool(tree.children(last)) and tree.child(last, self.decided.next_id) is None


def explain(requests: Sequence[ExplainRequest], logits: Tensor) -> list[Explanation]:
    """Explain each decision, before anything of it is committed. logits: [sum(K_b + 1), V] float32 of the step, where
    they are; the rows that are read are copied to the host at once.
    """
    rows = [each.start + 1 + each.decided.last for each in requests if each.is_rejection]
    host = HostLogits(logits[to_device(np.array(rows, dtype=np.int64), logits.device)])
    explanations = list[Explanation]()
    num_read = 0
    for request in requests:
        rejection = None
        if request.is_rejection:
            rejection = _rejection(request, host, num_read)
            num_read += 1
        tree, path = request.proposal.tree, request.decided.path
        explanations.append(Explanation(tree.ids, tree.parents, request.kinds, path, rejection, request.draft_us))
    return explanations


def _rejection(request: ExplainRequest, host: HostLogits, index: int) -> Rejection:
    """Return why the last row of a path ended it. index: of that row in `host`."""
    last, state = request.decided.last, request.state
    row = LogitRow(state, request.proposal.tree.prefix(last))
    if state.params.greedy:
        ids, probs = host.ranked(index, row, NUM_BEST)
        target = [(token_id, math.log(prob)) for token_id, prob in zip(ids, probs, strict=True) if prob > 0.0]
    else:
        target = best_of(host.law(index, row))
    drawn_from = _drawn_from(request)
    if drawn_from is None:
        return Rejection(last, request.decided.next_id, target, (), request.proposed_after(last)[:NUM_BEST])
    return Rejection(last, request.decided.next_id, target, best_of(drawn_from), ())


def best_of(law: RowLaw) -> list[Ranked]:
    """Return the likeliest ids of a law with their log-probs, best first and the lowest first among equals."""
    places = exactly_best(law.scores, min(NUM_BEST, law.scores.size))
    places = places[np.argsort(-law.scores[places], kind="stable")]
    probs = law.probs()[places].tolist()
    return [(law.id_of(int(at)), math.log(prob)) for at, prob in zip(places, probs, strict=True) if prob > 0.0]


def _drawn_from(request: ExplainRequest) -> RowLaw | None:
    """Return what was drawn from after the last accepted node, by the first that had a choice; a table had none: its
    law is of one token. None where nothing was sampled.
    """
    found: RowLaw | None = None
    for draw in request.proposal.draws:
        law = draw.distribution
        if draw.parent != request.decided.last or law is None or request.kinds[draw.node] is not DraftTokenKind.DRAWN:
            continue
        if law.scores.size > 1:
            return law
        found = found or law
    return found


# from what made the proposal


def explain_request(r: Ready, state: SamplingState, decided: Decided, start: int) -> ExplainRequest:
    """Return what explains a slot's step. start: the slot's first row among the step's logits."""
    kinds = [_kind(r, node) for node in range(len(r.draft_ids))]
    return ExplainRequest(
        r.proposal, state, decided, start, kinds, lambda node: _proposed_after(r, node), _take_draft_us(r)
    )


def _kind(r: Ready, node: int) -> DraftTokenKind:
    if r.drafter is None:
        return DraftTokenKind.FORCED
    if r.drafter is Drafter.PREDICTION:
        return DraftTokenKind.PREDICTED
    for source in r.sources:
        if node in source.drafts and source.drafts[node].kind is NodeKind.LAW:
            return DraftTokenKind.DRAWN
    return DraftTokenKind.GUESS


def _proposed_after(r: Ready, node: int) -> Sequence[int]:
    tree = r.proposal.tree
    verified = tree.children(node)
    for source in r.sources:
        ranks = {child: source.ranks[child] for child in verified if child in source.drafts}
        if ranks and isinstance(source.whose, Delivered):
            return source.whose.parked.guesses_after(tree.prefix(node))
        if ranks:
            return [tree.ids[child] for child in sorted(ranks, key=ranks.__getitem__)]
    return [tree.ids[child] for child in verified]


def _take_draft_us(r: Ready) -> int | None:
    """Return what draft workers say that this took, in microseconds: each delivery tells once, of the step that first
    verifies something of it.
    """
    deliveries = {}
    for source in r.sources:
        for draft in source.drafts.values():
            if isinstance(draft, ParkedNode) and draft.spent is not None:
                deliveries[id(draft.spent)] = draft.spent
    return sum(each.take_us() for each in deliveries.values()) if deliveries else None
