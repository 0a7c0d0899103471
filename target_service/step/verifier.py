"""Handles the jobs of a target's gateways on its engine thread; `step` runs the steps of all slots whose lease runs.

The engine thread calls `handle` for each job and `step` between jobs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.engine.model_runner import ModelRunner
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, CloseOwnerJob, JobError, JobFault, OpenJob, TruncateJob
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from target_service.drafting.own_drafts import OwnDrafts
from target_service.features.features import FeatureJob, Features
from target_service.leases.lease_jobs import ExtendJob, RefusedDelivery, VerifyJob
from target_service.leases.leases import Leases
from target_service.leases.slot_search import Beams
from target_service.step.prompt_scores import begin_scoring, scoring_refusal
from target_service.step.step import Step

if TYPE_CHECKING:
    from outrider.engine.drafter_table import SearchDrafts


class Verifier:
    """Runs the jobs that gateways and draft workers queue for the target's engine thread, and lets `Step` run steps."""

    def __init__(
        self,
        step: Step,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        leases: Leases,
        engine: EngineThread,
        max_prefill_tokens: int,
        own_drafts: OwnDrafts,
        features: Features,
        make_search_drafts: type[SearchDrafts],
    ) -> None:
        self._forget = step.forget
        self._runner = runner
        self._keeper = keeper
        self._leases = leases
        self._engine = engine
        self._max_prefill_tokens = max_prefill_tokens
        self._own_drafts = own_drafts
        self._features = features
        self._make_search_drafts = make_search_drafts
        self.next_wake = step.next_wake
        self.step = step.run
        self.fail_step = step.fail

    def handle(self, job: object) -> None:
        """Run one job, such as opening a slot. Raises TypeError for an object that is not a job."""
        match job:
            case ExtendJob():
                self._leases.extend(job, time.monotonic())
            case VerifyJob():
                self._verify(job)
            case FeatureJob(run):
                run(self._features)
            case RefusedDelivery(ticket, why):
                self._leases.refuse(ticket, why)
            case OpenJob():
                self._open(job)
            case TruncateJob():
                self._truncate(job)
            case CloseJob():
                self._forget((job.owner, job.slot_id))
                self._keeper.close(job)
            case CloseOwnerJob():
                for key in self._leases.slots_of(job.owner):
                    self._forget(key)
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _open(self, job: OpenJob) -> None:
        refused = self._own_drafts.refusal(job.drafter)
        if job.params.beams is not None and self._runner.tree_refusal is not None:
            why = f"use_beam_search is true, and this target runs no token trees: {self._runner.tree_refusal}"
            refused = JobError(JobFault.INVALID, f"{why}; leave it out, or start the target on another attention_path")
        refused = refused or scoring_refusal(job)
        if refused is not None:
            self._engine.answer(lambda: job.respond(refused))
            return
        slot = self._keeper.open(job)
        if slot is not None:
            self._leases.opened(job)
            self._features.closed(slot.key)
            self._own_drafts.open(job, slot)
            begin_scoring(job, slot)

    def _verify(self, job: VerifyJob) -> None:
        key = (job.owner, job.slot_id)
        self._leases.end(key, "a newer verify came")
        slot = self._keeper.table.get(*key)
        known_ids = list[int]()
        settled_ids: Sequence[int] = ()
        beams = None
        if slot is not None:
            known_ids = slot.committed[job.base_len :]
            beams = self._beams_of(slot, job)
        if beams is not None:
            settled_ids = beams.settled
        committed = self._keeper.commit(*key, job.base_len, (*job.committed_ids, *settled_ids))
        if isinstance(committed, JobError):
            self._leases.answer(job, committed)
            return
        slot = committed
        length = len(slot.committed)
        is_done = False
        if beams is not None:
            length = beams.tree.length
            is_done = beams.search.is_done
        if job.lease_end_len <= length or is_done:
            why = f"lease_end_len is {job.lease_end_len}, must be more than the {length} tokens committed"
            self._leases.answer(job, JobError(JobFault.INVALID, why))
            return
        num_same = job.base_len  # tokens that the slot had before the message
        for known_id, token_id in zip(known_ids, job.committed_ids, strict=False):
            if known_id != token_id:
                break
            num_same += 1
        self._own_drafts.commit(slot, num_same)
        self._features.cut(key, num_same)
        self._leases.begin(job, slot, beams)
        self._features.begin_leases(ticket for ticket, _ in job.tickets)

    def _beams_of(self, slot: Slot, job: VerifyJob) -> Beams | None:
        if slot.params.beams is None:
            return None
        slot.truncate(len(slot.committed) + 1)  # behind these lie nodes, whose ids may be those of what is settled now
        return Beams(
            slot.params,
            slot.committed[: slot.num_prompt],
            job.levels,
            self._runner.facts.eos_token_ids,
            self._leases.speculation_of(slot.key),
            self._max_prefill_tokens,
            self._make_search_drafts,
        )

    def _truncate(self, job: TruncateJob) -> None:
        # A slot with a lease has cut itself and may be ahead of the message: it keeps its tokens unless a stop string
        # ended its output.
        key = (job.owner, job.slot_id)
        if job.reason == "stop":
            self._leases.end(key, "a stop string ended the answer")
        self._keeper.truncate(job, keeps=self._leases.get(key) is not None)
