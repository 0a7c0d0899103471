"""Explain which draft tokens a step verified for a slot, and why it accepted no more. For requests with `explain`;
called by `step`.

It runs after the decision and does not change it: it draws nothing, and reads one row of logits per explained slot. No
worker reads an explanation, so it is made as the message that goes to the user.
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
from outrider.engine.sampling.token_distribution import TokenDistribution, exactly_best
from outrider.engine.worker.jobs import SlotKey
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.drafters import Drafter
from target_service.drafting.proposal import Proposal
from target_service.leases.lease import SlotDraftWorker
from target_service.step.step_rows import Decided

NUM_BEST = 5
"""Maximum number of likeliest tokens that an explanation lists for a position, which is the protocol's maximum."""


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """Decided step of one slot, to be explained to the user."""

    proposal: Proposal
    state: SamplingState
    decided: Decided
    start: int
    """Index of the slot's first row among the step's logits."""


def explain(requests: Sequence[ExplainRequest], logits: Tensor) -> dict[SlotKey, pb.Explanation]:
    """Return the explanation of each decided step, by slot. Call it before any of the decisions is committed.

    logits: [R, V] float32 of the step, on any device; the rows that are needed are copied to the host at once.
    """
    rows = [request.start + 1 + request.decided.last for request in requests]
    host = HostLogits(logits[to_device(np.array(rows), logits.device)])  # [len(requests), V]
    explanations = dict[SlotKey, pb.Explanation]()
    for index, request in enumerate(requests):
        proposal = request.proposal
        decided = request.decided
        tree = proposal.tree
        explanation = pb.Explanation(draft_us=_pop_draft_us(proposal))
        for node, (token_id, parent) in enumerate(zip(tree.ids, tree.parents, strict=True)):
            kind = _kind(proposal, node)
            explanation.draft.add(id=token_id, parent=parent, kind=kind, is_accepted=node in decided.path)
        if tree.children(decided.last) and tree.child(decided.last, decided.next_id) is None:
            _add_rejection(explanation.rejection, request, host, index)
        explanations[proposal.slot.key] = explanation
    return explanations


def _add_rejection(rejection: pb.Rejection, request: ExplainRequest, host: HostLogits, index: int) -> None:
    last = request.decided.last
    state = request.state
    proposal = request.proposal
    row = LogitRow(state, proposal.tree.prefix(last))
    rejection.parent = last
    rejection.token.id = request.decided.next_id
    if state.params.greedy:
        rejection.target.extend(_ranked(*host.ranked(index, row, NUM_BEST)))
    else:
        rejection.target.extend(best_of(host.distribution(index, row)))
    drawn_from = _drawn_from(proposal, last)
    if drawn_from is not None:
        rejection.draft_distribution.extend(best_of(drawn_from))
        return
    for token_id in _proposed_after(proposal, last)[:NUM_BEST]:
        rejection.deterministic_tokens.add(id=token_id)


def best_of(distribution: TokenDistribution) -> list[pb.RankedToken]:
    """Return the NUM_BEST likeliest ids of a distribution with their log-probs, best first; among equally likely ids,
    the lowest first.
    """
    places = exactly_best(distribution.scores, min(NUM_BEST, distribution.scores.size))
    places = places[np.argsort(-distribution.scores[places], kind="stable")]
    ids = [distribution.id_of(int(place)) for place in places]
    return _ranked(ids, distribution.probs()[places].tolist())


def _ranked(ids: Sequence[int], probs: Sequence[float]) -> list[pb.RankedToken]:
    found = list[pb.RankedToken]()
    for token_id, prob in zip(ids, probs, strict=True):
        if prob > 0.0:
            found.append(pb.RankedToken(id=token_id, logprob=math.log(prob)))
    return found


def _kind(proposal: Proposal, node: int) -> pb.DraftTokenKind:
    slot_drafter = proposal.drafter_of_node(node)
    if slot_drafter is None or slot_drafter.drafter is None:
        return pb.DRAFT_TOKEN_KIND_FORCED
    if slot_drafter.drafter is Drafter.PREDICTION:
        return pb.DRAFT_TOKEN_KIND_PREDICTED
    for draw in proposal.draws:
        if draw.node == node and not draw.is_one_token:
            return pb.DRAFT_TOKEN_KIND_SAMPLED
    return pb.DRAFT_TOKEN_KIND_DETERMINISTIC


def _drawn_from(proposal: Proposal, parent: int) -> TokenDistribution | None:
    for draw in proposal.draws:  # of the first drafter that had a choice
        if proposal.tree.parents[draw.node] == parent and draw.distribution is not None and not draw.is_one_token:
            return draw.distribution
    return None


def _proposed_after(proposal: Proposal, parent: int) -> Sequence[int]:
    tree = proposal.tree
    for slot_drafter, ranks in proposal.slot_drafters.items():  # of the first drafter that has some
        children = list[int]()
        for child in tree.children(parent):
            if child in ranks:
                children.append(child)
        if children and isinstance(slot_drafter, SlotDraftWorker):
            return slot_drafter.buffer.deterministic_ids_after(tree.prefix(parent))  # those that are not verified, too
        if children:
            children.sort(key=ranks.__getitem__)
            return [tree.ids[child] for child in children]
    return ()


def _pop_draft_us(proposal: Proposal) -> int | None:
    # A delivery counts once: for the step that first verifies something of it.
    costs = list[int]()
    for slot_drafter, ranks in proposal.slot_drafters.items():
        if isinstance(slot_drafter, SlotDraftWorker):
            for node in ranks:
                costs += slot_drafter.buffer.pop_cost_us(proposal.tree.prefix(node))
    if not costs:
        return None
    return sum(costs)
