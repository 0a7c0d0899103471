"""The draft's engine worker: grows draft tokens in every slot and sends them to the slot's target, without rounds.

In each step the drafter computes the distributions after the likeliest nodes of all slots together, as many as use its
time best. The step then makes the nodes' children and sends them. Everything here runs on the engine thread.

    # committed "the cat"; the first step feeds ROOT ("cat") and makes its children:
    #   0 "sat", 1 "ran"                        parents [ROOT, ROOT]
    # the next step feeds node 0, the likeliest, and makes its children:
    #   2 "on", 3 "down"                        parents [ROOT, ROOT, 0, 0]
    # an Advance commits "sat on", nodes 0 and 2: node 2 becomes ROOT, and nodes 1 and 3 are dropped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from draft_service.growing.node_scheduler import NodeScheduler
from draft_service.growing.pushing import NUM_URGENT, NodeSender, Send
from draft_service.slot_jobs import AdvanceJob, EngineJob, FeaturesJob, FeaturesRequest
from draft_service.slots.draft_slot import DraftSlot
from draft_service.slots.head_slot import HeadSlot
from outrider.engine.drafter_table import draft_tree_class
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.growth import Growth, GrowthSetup, OpenAhead
from outrider.engine.speculation.node_drafter import NodeDistribution, NodeDrafter
from outrider.engine.speculation.plan import MAX_FED
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, CloseOwnerJob, JobError, JobFault, OpenJob, SlotKey, TruncateJob
from outrider.engine.worker.open_slots import BareSlot
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.telemetry.metrics import WorkerMetrics

MAX_WHOLE_IDS = 2048
"""Limit for `auto`, a value of the setting `draft_logprobs`. A distribution is sent whole if the vocabulary's size,
times the number of the worker's slots with sampled draft tokens, is at most this number; else only its likeliest ids
are sent. With 4,096 ids, whole distributions took 117 to 156 kB for each committed token, and cut ones 5 to 9 kB."""
MAX_DISTRIBUTION_BYTES = 64 << 20
"""Maximum bytes of distributions that one slot's draft tree keeps, in case its nodes have to be sent again."""
BYTES_AN_ID = 20
"""Bytes per id of a kept distribution: a float32 score (log-probability), an int64 id and a float64 weight
(probability)."""

MakeDrafter = Callable[[Mapping[SlotKey, DraftSlot]], NodeDrafter[DraftSlot]]
"""Function that creates the drafter of a worker, given the worker's slots by key."""
RequestFeatures = Callable[[str, int, FeaturesRequest], None]
"""Function that requests features from a target. Arguments: the target's address, its epoch, and the request. Runs on
the gRPC loop's thread."""


class Grower:
    """Runs the jobs and steps of a draft worker, on its engine thread. It owns the slots and their draft trees."""

    def __init__(
        self,
        make_drafter: MakeDrafter,
        keeper: SlotKeeper[BareSlot],
        engine: EngineThread,
        send: Send,
        metrics: WorkerMetrics,
        request_features: RequestFeatures,
        open_ahead: OpenAhead | None = None,
    ) -> None:
        self._slots: dict[SlotKey, DraftSlot] = {}
        self._drafter = make_drafter(self._slots)
        self._scheduler = NodeScheduler(self._drafter)
        self._keeper = keeper
        self._engine = engine
        self._pusher = NodeSender(engine, send, metrics)
        self._metrics = metrics
        self._request_rows = request_features
        self._open_ahead = open_ahead
        self._acceptance: dict[object, RankAcceptance] = {}
        """Acceptance probabilities by rank of all slots of one kind, by the key from `Growth.acceptance_key`."""

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case AdvanceJob():
                self._advance(job)
            case OpenJob():
                self._open(job)
            case TruncateJob():
                self._truncate(job)
            case FeaturesJob():
                self._store_features(job)
            case EngineJob():
                job.run()
            case CloseJob():
                self._forget((job.owner, job.slot_id))
                self._keeper.close(job)
            case CloseOwnerJob():
                for key in list(self._slots):
                    if key[0] == job.owner:
                        self._forget(key)
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _open(self, job: OpenJob) -> None:
        is_translated = job.vocabulary is not None and job.vocabulary.translation is not None
        growth = draft_tree_class(job.params)
        why = growth.refusal(self._drafter, is_translated=is_translated)
        if why is not None:
            self._engine.answer(partial(job.respond, JobError(JobFault.INVALID, why)))
            return
        slot = self._keeper.open(job)
        if slot is None:
            return
        acceptance = SlotAcceptance(self._acceptance.setdefault(growth.acceptance_key(job.params), RankAcceptance()))
        draft_slot = DraftSlot(job, slot, acceptance)
        draft_slot.tree = self._growth(draft_slot)
        if self._open_ahead is not None and not is_translated:
            draft_slot.ahead = self._open_ahead(job, slot)
        self._slots[slot.key] = draft_slot

    def _growth(self, draft_slot: DraftSlot) -> Growth:
        params = draft_slot.job.params
        speculation = draft_slot.job.speculation
        topk = None
        max_fed = MAX_FED
        if not params.is_deterministic:
            num_ids = self._keeper.vocab_size_of(draft_slot.slot)
            if not self._sends_whole(speculation.draft_logprobs, num_ids):
                topk = speculation.draft_topk
            distribution_bytes = BYTES_AN_ID * (topk or num_ids)
            max_fed = min(MAX_FED, MAX_DISTRIBUTION_BYTES // distribution_bytes)
        setup = GrowthSetup(
            draft_slot.slot,
            speculation,
            draft_slot.acceptance,
            self._drafter,
            topk,
            max_fed,
            self._keeper.eos_token_ids,
        )
        return draft_tree_class(params)(setup)

    def _sends_whole(self, draft_logprobs: DraftLogprobs, num_ids: int) -> bool:
        if draft_logprobs is not DraftLogprobs.AUTO:
            return draft_logprobs is DraftLogprobs.FULL
        num_sampled = sum(not draft_slot.slot.params.is_deterministic for draft_slot in self._slots.values())
        return num_ids * num_sampled <= MAX_WHOLE_IDS

    def _forget(self, key: SlotKey) -> None:
        draft_slot = self._slots.pop(key, None)
        if draft_slot is not None and draft_slot.ahead is not None:
            draft_slot.ahead.close()

    def _truncate(self, job: TruncateJob) -> None:
        """Truncate a slot that does not grow.

        For a growing slot an Advance brings it to the same length, and the draft tokens under the committed ones stay.
        After a stop string the slot stops growing.
        """
        draft_slot = self._slots.get((job.owner, job.slot_id))
        if draft_slot is not None and job.reason == "stop":
            draft_slot.is_growing = False
        self._keeper.truncate(job, keeps=draft_slot is not None and draft_slot.is_growing)

    def _advance(self, job: AdvanceJob) -> None:
        draft_slot = self._slots.get((job.owner, job.slot_id))
        if draft_slot is None:
            return  # closed meanwhile, or refused: the reply was sent, or is on its way
        slot = draft_slot.slot
        is_new_lease = not draft_slot.is_growing or job.ticket != draft_slot.ticket
        new_len = job.base_len + len(job.decided)
        if not is_new_lease and new_len <= draft_slot.tree.known_len and not job.error:
            return  # late, or repeated
        error = draft_slot.tree.check(job.base_len, job.decided, self._keeper.check_commit)
        if job.error:
            error = JobError(JobFault.INVALID, job.error)
        if error is not None:
            self._respond(draft_slot, error)
            return
        is_kept = draft_slot.tree.continues(job.base_len, job.decided, is_new_lease=is_new_lease)
        if not is_kept:
            self._start_tree(draft_slot, job)
        elif new_len > draft_slot.tree.known_len:
            self._continue_tree(draft_slot, job)
        if draft_slot.ahead is not None:
            draft_slot.ahead.commit_from(job.base_len, job.decided)
        slot.last_request_s = time.monotonic()
        if job.is_missed or (is_new_lease and is_kept):
            draft_slot.tree.resend()
        draft_slot.ticket = job.ticket
        draft_slot.is_growing = True
        draft_slot.num_urgent = 0
        if not draft_slot.tree.has_drafts:
            draft_slot.num_urgent = NUM_URGENT
        self._request_missing(draft_slot)
        self._pusher.push_due(draft_slot)

    def _start_tree(self, draft_slot: DraftSlot, job: AdvanceJob) -> None:
        """Commit the decided tokens and start a new tree.

        Before the cache is compared with the committed tokens, the old tree's nodes must leave it: nodes are cached in
        the order in which they were fed, so their ids may equal those of the committed tokens while their keys and
        values differ.
        """
        slot = draft_slot.slot
        slot.truncate(len(slot.committed) + 1)
        slot.commit_from(job.base_len, job.decided)
        slot.settle()
        draft_slot.tree = self._growth(draft_slot)
        draft_slot.block = None

    def _continue_tree(self, draft_slot: DraftSlot, job: AdvanceJob) -> None:
        tree = draft_slot.tree
        draft_slot.block = None
        num_fed = len(tree.fed)
        is_cached = self._drafter.is_cached(draft_slot)
        new = job.decided[tree.known_len - job.base_len :]  # base_len 5, known_len 6: without the first one
        keep = tree.commit_decided(new)
        if is_cached:
            self._drafter.keep_fed(draft_slot, num_fed, keep)
        else:
            draft_slot.slot.settle()
            tree.restart()

    def _request_missing(self, draft_slot: DraftSlot) -> None:
        # Also features that are on their way: they may be lost, and requesting twice is harmless.
        job = draft_slot.job
        slot = draft_slot.slot
        if isinstance(slot, HeadSlot) and slot.is_missing_features:
            request = FeaturesRequest(draft_slot.ticket, slot.next_position, slot.request_id)
            self._engine.answer(partial(self._request_rows, job.target_address, job.target_epoch, request))

    def _store_features(self, job: FeaturesJob) -> None:
        # Features of another ticket or epoch of the target, or past the slot's maximum length, are dropped.
        job.on_stored()
        for draft_slot in self._slots.values():
            slot = draft_slot.slot
            is_current = draft_slot.job.target_epoch == job.target_epoch
            if draft_slot.ticket == job.ticket and is_current and isinstance(slot, HeadSlot):
                if job.start + len(job.rows) <= slot.max_len:
                    slot.store_features(job.start, job.rows, job.request_id)
                return

    def _respond(self, draft_slot: DraftSlot, error: JobError) -> None:
        self._engine.answer(partial(draft_slot.job.respond, error))

    # steps: choose, propose, grow, send

    def next_wake(self) -> float | None:
        return self._drafter.next_wake()

    def step(self, now: float) -> bool:
        """Feed the likeliest nodes of all slots, add children to these nodes, and send the new nodes to the targets.
        Return whether anything was fed.

        `now`: monotonic time, in seconds.
        """
        # 1 CHOOSE the nodes, and feed them
        chosen = self._scheduler.choose(self._slots.values(), now)
        self._engine.flush()  # the drafter is about to work: send what is buffered first
        distributions = self._drafter.propose(chosen, now)
        if distributions is None:
            return False
        for distribution in distributions:
            distribution.tree.feed(distribution.node)

        # 2 GROW their children, then the children of these for which look-ahead rows were fed, and so on
        slots = {draft_slot.tree: draft_slot for draft_slot, _ in chosen}
        num_rows = len(distributions)
        began_s = now
        while distributions:
            for tree, why in grow(distributions).items():
                self._fail(slots[tree], why)
            self._metrics.steps.labels(kind="grow").inc(len(distributions))
            ended_s = time.monotonic()
            for tree in {distribution.tree for distribution in distributions}:
                slots[tree].spent_s += ended_s - began_s
            for draft_slot in slots.values():
                if not draft_slot.slot.params.is_deterministic:  # a token's time must not depend on its id: it is sent
                    self._pusher.push_due(draft_slot)  # before its id is read
            began_s = ended_s
            distributions = _distributions_ahead(slots, distributions)

        # 3 SEND what is due
        for draft_slot in slots.values():
            num_rows += self._end_ahead(draft_slot)
            self._pusher.push_due(draft_slot)
        seconds = time.monotonic() - now
        if num_rows:
            self._scheduler.note(num_rows, seconds)
        self._metrics.busy_seconds.inc(seconds)
        self._keeper.refresh_gauges()
        return True

    def _end_ahead(self, draft_slot: DraftSlot) -> int:
        # Removes the look-ahead rows that became no nodes from the cache, and returns how many rows were fed.
        if draft_slot.ahead is None or not draft_slot.is_growing:
            return 0
        num_fed, kept = draft_slot.ahead.end_step()
        if len(kept) < num_fed:
            self._drafter.keep_fed(draft_slot, num_fed, kept)
        self._metrics.guessed_tokens.labels(fate="drawn").inc(len(kept))
        self._metrics.guessed_tokens.labels(fate="dropped").inc(num_fed - len(kept))
        return num_fed

    def fail_step(self, error: Exception) -> None:
        """Close every slot in which draft tokens grow. Call it after a step has raised `error`, since the caches of
        these slots may be wrong. The gateway then opens the slots again.
        """
        for draft_slot in list(self._slots.values()):
            if draft_slot.is_growing:
                self._fail(draft_slot, f"the draft's step failed: {error}")

    def _fail(self, draft_slot: DraftSlot, why: str) -> None:
        self._respond(draft_slot, JobError(JobFault.INTERNAL, why))
        draft_slot.slot.invalidate()
        draft_slot.is_growing = False
        del self._slots[draft_slot.slot.key]
        self._keeper.close(CloseJob(*draft_slot.slot.key))


def _distributions_ahead(
    slots: Mapping[Growth, DraftSlot], distributions: Sequence[NodeDistribution]
) -> list[NodeDistribution]:
    # A look-ahead row whose token became the child of its node has computed the distribution after that child.
    after_children = list[NodeDistribution]()
    for distribution in distributions:
        draft_slot = slots[distribution.tree]
        if draft_slot.ahead is not None and draft_slot.is_growing:
            after_child = draft_slot.ahead.follow(distribution)
            if after_child is not None:
                after_children.append(after_child)
    return after_children
