"""Beam searches in the target's step: their part of the forward, the commit of decided levels, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.beam import BeamLevel, Hypothesis
from outrider.engine.step_plan import Row
from outrider.wire.requests.drafters import Drafter
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.leases.lease import Lease
from target_service.leases.lease_jobs import DraftOutcome, Fallback, Finish, Verdict
from target_service.leases.slot_search import Beams, SearchInput
from target_service.step.commit import kinds_of
from target_service.step.verdicts import StepClock


class SearchStep(NamedTuple):
    """Work of one step for one beam search, planned before the forward: the beams and draft tokens to feed, as a row of
    the forward.
    """

    lease: Lease
    beams: Beams
    fed: SearchInput
    row: Row
    fallback: Fallback | None
    """Reason why no draft token is verified: late, refused or does not pay. None if some are, or if none of these is
    the reason."""


def commit_search(
    search: SearchStep,
    levels: Sequence[BeamLevel],
    times: StepClock,
    runner: ModelRunner,
    metrics: WorkerMetrics,
) -> Verdict:
    """Commit the levels that a step decided for a beam search, and return the verdict. Raises OutOfBlocks if a block
    must be copied to cut the cache, and none is free.
    """
    lease = search.lease
    beams = search.beams
    fed = search.fed
    slot = lease.slot
    draft = lease.first
    length = beams.tree.length
    num_drafted = len(fed.draft_nodes)
    num_accepted = len(levels) - 1
    finish: Finish | None = None
    hypotheses: Sequence[Hypothesis] = ()
    if beams.search.is_done:
        slot.truncate(len(slot.committed))
        finish = Finish.LENGTH
        if levels[-1].active:
            finish = Finish.STOP
        hypotheses = beams.search.hypotheses()
    else:
        metrics.count_delivered("pruned", beams.advance(slot, fed, levels, runner))
    metrics.count_delivered("verified", num_drafted)
    beams.drafts.learn(draft.acceptance, fed.depth, num_accepted)
    outcome = DraftOutcome(
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        is_verified=num_drafted > 0,
        has_drafts=draft.has_drafts,
        is_refused=draft.is_refused,
        num_wasted=draft.buffer.num_wasted,
    )
    return Verdict(
        committed_len=length,
        token_ids=(),
        kinds=kinds_of(num_accepted, num_drafted, len(levels) > fed.depth),
        finish=finish,
        outcomes=[outcome] + [DraftOutcome()] * len(lease.drafts),
        drafter=Drafter.MODEL if num_drafted else None,
        depth=fed.depth,
        fallback=search.fallback,
        timings=times.timings(lease),
        num_cached_tokens=slot.num_adopted or 0,
        levels=levels,
        hypotheses=hypotheses,
    )
