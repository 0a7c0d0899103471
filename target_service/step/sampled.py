"""Slots that sample, in the target's step: their part of the forward, the commit of a decision, and the verdict."""

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
from target_service.leases.lease import Lease
from target_service.leases.lease_jobs import Fallback, Verdict
from target_service.step.commit import commit_tokens, kinds_of
from target_service.step.prompt_scores import pop_scores
from target_service.step.step_rows import Decided
from target_service.step.verdicts import StepClock, drafter_of, learn


@dataclass(frozen=True, slots=True)
class SlotStep:
    """Work of one step for one slot that samples, planned before the forward: the draft tokens to verify, and the row
    to feed. After the forward, `commit_sampled` commits the tokens that were decided.
    """

    lease: Lease
    proposal: Proposal
    row: Row
    fallback: Fallback | None
    """Reason why no draft token is verified though some were to be expected; else None."""


def commit_sampled(
    slot_step: SlotStep,
    decided: Decided,
    extra_logits: Tensor | None,
    explanation: pb.Explanation | None,
    times: StepClock,
    runner: ModelRunner,
    own_drafts: OwnDrafts,
    features: Features,
    metrics: WorkerMetrics,
) -> Verdict:
    """Commit the tokens that a step decided for a slot, up to the end of its output, and return the verdict.

    slot_step: what was planned for the slot. extra_logits: logits [E, V] float32 after the slot's E extra rows; None if
    it has none. explanation: explanation of the step, or None; the rejection in it is cleared if the output ends before
    the rejected token. times: times of the step.
    """
    lease = slot_step.lease
    proposal = slot_step.proposal
    slot = lease.slot
    tree = proposal.tree
    path = decided.path
    committed_len = len(slot.committed)
    if proposal.extra_rows is not None and extra_logits is not None:
        own_drafts.read(slot, extra_logits, path, proposal.extra_rows)
    kept = _keep_path(slot_step, path, runner)
    num_output = committed_len - slot.num_prompt
    decided_ids = [*tree.prefix(decided.last), decided.next_id]
    token_ids, finish = commit_tokens(slot.params, runner.facts.eos_token_ids, num_output, decided_ids)
    num_tokens = len(token_ids)
    if explanation is not None and num_tokens <= len(path):  # the output ends before the rejection
        explanation.ClearField("rejection")
    slot.commit_from(committed_len, token_ids)
    slot.settle()
    num_kept = len(kept) - len(path) + num_tokens  # without the tokens behind the output's end
    features.note_committed(slot.key, slot_step.row, kept[:num_kept])
    predicted = own_drafts.append(slot, token_ids)
    return Verdict(
        committed_len=committed_len,
        token_ids=token_ids,
        kinds=kinds_of(len(path), len(tree), not tree.children(decided.last))[:num_tokens],
        finish=finish,
        outcomes=learn(lease, proposal, path, num_tokens, predicted, metrics),
        drafter=drafter_of(proposal),
        depth=tree.max_depth,
        fallback=slot_step.fallback,
        timings=times.timings(lease),
        num_cached_tokens=slot.num_adopted or 0,
        num_predicted=sum(predicted),
        logprobs=decided.reported[:num_tokens],
        prompt_logprobs=pop_scores(slot),
        explanation=explanation,
    )


def _keep_path(slot_step: SlotStep, path: Sequence[int], runner: ModelRunner) -> list[int]:
    # fed: 2 committed tokens, then nodes 0 to 3; path (0, 2): [0, 1, 2, 4] stay
    row = slot_step.row
    first = row.num_new - row.num_logits + 1  # committed tokens before the draft tokens
    kept = [*range(first), *(first + node for node in path)]
    if row.parents is not None:  # a tree, or rows beside: the rejected ones leave the cache
        runner.compact(row, kept)
        slot_step.lease.slot.compacted(row.num_cached, [row.new_ids[index] for index in kept])
    return kept
