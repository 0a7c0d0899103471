"""Explains to slots that ask for it what a step verified and why it went no further.

It runs after the decision and changes nothing of it: it draws nothing, and reads the logits once more, of one row of
each such slot. No worker reads an explanation, so it is made as the message that the user's answer carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.engine.host_copy import to_device
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw, exactly_best
from outrider.engine.worker.jobs import SlotKey
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.drafters import Drafter
from target_service.drafting.proposal import Proposal
from target_service.leases.lease import DeliveredDrafts
from target_service.step.step_rows import Decided

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


def explain(requests: Sequence[ExplainRequest], logits: Tensor) -> dict[SlotKey, pb.Explanation]:
    """Explain each decision, by slot, before anything of it is committed.

    logits: [sum(N_b + 1), V] float32 of the step, where they are; the rows that are read go to the host at once.
    """
    rows = [request.start + 1 + request.decided.last for request in requests]
    host = HostLogits(logits[to_device(np.array(rows), logits.device)])
    explanations = dict[SlotKey, pb.Explanation]()
    for index, request in enumerate(requests):
        proposal = request.proposal
        decided = request.decided
        tree = proposal.tree
        explanation = pb.Explanation(draft_us=_take_draft_us(proposal))
        for node, (token_id, parent) in enumerate(zip(tree.ids, tree.parents, strict=True)):
            kind = _kind(proposal, node)
            explanation.draft.add(id=token_id, parent=parent, kind=kind, accepted=node in decided.path)
        if tree.children(decided.last) and tree.child(decided.last, decided.next_id) is None:
            _add_rejection(explanation.rejection, request, host, index)
        explanations[proposal.slot.key] = explanation
    return explanations


def _add_rejection(rejection: pb.Rejection, request: ExplainRequest, host: HostLogits, index: int) -> None:
    """Explain why a path ended before its draft tokens did. index: of the row after its last node in `host`."""
    last, state, proposal = request.decided.last, request.state, request.proposal
    row = LogitRow(state, proposal.tree.prefix(last))
    rejection.parent = last
    rejection.token.id = request.decided.next_id
    if state.params.greedy:
        rejection.target.extend(_ranked(*host.ranked(index, row, NUM_BEST)))
    else:
        rejection.target.extend(best_of(host.law(index, row)))
    drawn_from = _drawn_from(proposal, last)
    if drawn_from is not None:
        rejection.draft_law.extend(best_of(drawn_from))
        return
    for token_id in _proposed_after(proposal, last)[:NUM_BEST]:
        rejection.draft_guesses.add(id=token_id)


def best_of(law: RowLaw) -> list[pb.RankedToken]:
    """Return the likeliest ids of a distribution with their log-probs, best first and the lowest first among equals."""
    places = exactly_best(law.scores, min(NUM_BEST, law.scores.size))
    places = places[np.argsort(-law.scores[places], kind="stable")]
    return _ranked([law.id_of(int(place)) for place in places], law.probs()[places].tolist())


def _ranked(ids: Sequence[int], probs: Sequence[float]) -> list[pb.RankedToken]:
    found = list[pb.RankedToken]()
    for token_id, prob in zip(ids, probs, strict=True):
        if prob > 0.0:
            found.append(pb.RankedToken(id=token_id, logprob=math.log(prob)))
    return found


def _kind(proposal: Proposal, node: int) -> pb.DraftTokenKind:
    source = proposal.source_of(node)
    if source is None or source.drafter is None:
        return pb.DRAFT_TOKEN_KIND_FORCED
    if source.drafter is Drafter.PREDICTION:
        return pb.DRAFT_TOKEN_KIND_PREDICTED
    if any(draw.node == node and not draw.is_one_token for draw in proposal.draws):
        return pb.DRAFT_TOKEN_KIND_DRAWN
    return pb.DRAFT_TOKEN_KIND_GUESS


def _drawn_from(proposal: Proposal, parent: int) -> RowLaw | None:
    """Return what was sampled from after a node, by the first drafter that had a choice; None where none had."""
    for draw in proposal.draws:
        if proposal.tree.parents[draw.node] == parent and draw.distribution is not None and not draw.is_one_token:
            return draw.distribution
    return None


def _proposed_after(proposal: Proposal, parent: int) -> Sequence[int]:
    """Return the deterministic tokens after a node, verified or not, best first, of the first drafter that has some."""
    tree = proposal.tree
    for source, ranks in proposal.sources.items():
        own = [child for child in tree.children(parent) if child in ranks]
        if own and isinstance(source, DeliveredDrafts):
            return source.buffer.guesses_after(tree.prefix(parent))
        if own:
            own.sort(key=ranks.__getitem__)
            return [tree.ids[child] for child in own]
    return ()


def _take_draft_us(proposal: Proposal) -> int | None:
    """Return what draft workers spent on the proposal, in microseconds: each delivery counts once, for the step that
    first verifies something of it. None where none drafted, or none says.
    """
    costs = list[int]()
    for source, ranks in proposal.sources.items():
        if isinstance(source, DeliveredDrafts):
            for node in ranks:
                costs += source.buffer.take_cost_us(proposal.tree.prefix(node))
    return sum(costs) if costs else None
