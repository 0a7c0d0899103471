"""Sampled slots in the target's step: their share of the forward, what they commit, and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.v1 import common_pb2 as pb
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.own_drafts import OwnDrafts
from target_service.drafting.proposal import Proposal
from target_service.features.features import Features
from target_service.leases.jobs import Fallback, Verdict
from target_service.leases.lease import Lease
from target_service.step.commit import commit_tokens, kinds_of
from target_service.step.prompt_scores import take_scores
from target_service.step.step_rows import Decided
from target_service.step.verdicts import StepTimes, drafter_of, learn


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one slot feeds to the step."""

    lease: Lease
    proposal: Proposal
    row: Row
    fallback: Fallback | None
    """Why there are no draft tokens, where there were to be some."""


def commit_sampled(
    share: StepShare,
    decided: Decided,
    beside: Tensor | None,
    explanation: pb.Explanation | None,
    times: StepTimes,
    runner: ModelRunner,
    own_drafts: OwnDrafts,
    features: Features,
    metrics: WorkerMetrics,
) -> Verdict:
    """Commit what a slot accepted, up to the end of its output. beside: the logits after its rows beside."""
    lease = share.lease
    proposal = share.proposal
    slot = lease.slot
    tree = proposal.tree
    path = decided.path
    committed_len = len(slot.committed)
    if proposal.rows_beside is not None and beside is not None:
        own_drafts.read(slot, beside, path, proposal.rows_beside)
    kept = _keep_path(share, path, runner)
    num_output = committed_len - slot.num_prompt
    decided_ids = [*tree.prefix(decided.last), decided.next_id]
    token_ids, finish = commit_tokens(slot.params, runner.facts.eos_token_ids, num_output, decided_ids)
    num_tokens = len(token_ids)
    if explanation is not None and num_tokens <= len(path):  # it ended before it was rejected
        explanation.ClearField("rejection")
    slot.commit_from(committed_len, token_ids)
    slot.settle()
    num_kept = len(kept) - len(path) + num_tokens  # not what lies behind the output's end
    features.stays(slot.key, share.row, kept[:num_kept])
    foretold = own_drafts.append(slot, token_ids)
    return Verdict(
        committed_len=committed_len,
        token_ids=token_ids,
        kinds=kinds_of(len(path), len(tree), not tree.children(decided.last))[:num_tokens],
        finish=finish,
        outcomes=learn(lease, proposal, path, num_tokens, foretold, metrics),
        drafter=drafter_of(proposal),
        depth=tree.max_depth,
        fallback=share.fallback,
        timings=times.timings(lease),
        num_cached_tokens=slot.num_adopted or 0,
        num_foretold=sum(foretold),
        logprobs=decided.reported[:num_tokens],
        prompt_logprobs=take_scores(slot),
        explanation=explanation,
    )


def _keep_path(share: StepShare, path: Sequence[int], runner: ModelRunner) -> list[int]:
    """Return which of the tokens that were fed stay with an accepted path. Of a row with nodes side by side only these
    stay in the cache.
    """
    row = share.row
    first = row.num_new - row.num_logits + 1  # committed tokens before the draft tokens
    kept = [*range(first), *(first + node for node in path)]
    if row.parents is not None:
        runner.compact(row, kept)
        share.lease.slot.compacted(row.num_cached, [row.new_ids[index] for index in kept])
    return kept
