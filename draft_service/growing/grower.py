"""The draft's engine worker: grows draft tokens in every slot and sends them to the slot's target, without rounds.

In each step the drafter computes the distributions after the likeliest nodes of all slots together, as many as use its
time best. The step then makes the nodes' children and sends them. Everything here runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from draft_service.growing.node_scheduler import NodeScheduler
from draft_service.growing.pushing import NUM_URGENT, Pusher, Send
from draft_service.jobs import AdvanceJob, EngineJob, RowsJob, RowsRequest
from draft_service.slots.draft_slot import DraftSlot
from draft_service.slots.head_slot import HeadSlot
from outrider.engine.drafters import growth_of
from outrider.engine.speculation.drafter import NodeDistribution, NodeDrafter
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.growth import Growth, GrowthSetup, OpenAhead
from outrider.engine.speculation.plan import MAX_FED
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, SlotKey, TruncateJob
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import BareSlot
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.telemetry.metrics import WorkerMetrics

MAX_WHOLE_IDS = 2048
"""Maximum number of ids, in one distribution of each slot together, at which `auto` sends whole distributions. Draft
tokens that are never verified are sent, too: whole distributions of 4,096 ids took 117 to 156 kB for each committed
token, cut ones 5 to 9 kB."""
MAX_DISTRIBUTION_BYTES = 64 << 20
"""Maximum bytes of distributions kept in one slot's tree, in case they have to be sent again."""
BYTES_AN_ID = 20
"""Bytes of a kept distribution for each of its ids: a float32 score, an int64 id and a float64 weight."""

MakeDrafter = Callable[[Mapping[SlotKey, DraftSlot]], NodeDrafter[DraftSlot]]
"""Creates the drafter of a worker, given the worker's slots by key."""
RequestRows = Callable[[str, int, RowsRequest], None]
"""Requests rows from the target at (address, epoch). Runs on the gRPC loop's thread."""


class Grower:
    """Owner of the draft worker's slots and their trees, which runs its jobs and steps."""

    def __init__(
        self,
        make_drafter: MakeDrafter,
        keeper: SlotKeeper[BareSlot],
        engine: EngineThread,
        send: Send,
        metrics: WorkerMetrics,
        request_rows: RequestRows,
        open_ahead: OpenAhead | None = None,
    ) -> None:
        self._slots: dict[SlotKey, DraftSlot] = {}
        self._drafter = make_drafter(self._slots)
        self._scheduler = NodeScheduler(self._drafter)
        self._keeper = keeper
        self._engine = engine
        self._pusher = Pusher(engine, send, metrics)
        self._metrics = metrics
        self._request_rows = request_rows
        self._open_ahead = open_ahead
        self._shares: dict[object, RankShares] = {}

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case AdvanceJob():
                self._advance(job)
            case OpenJob():
                self._open(job)
            case TruncateJob():
                self._truncate(job)
            case RowsJob():
                self._take_rows(job)
            case EngineJob():
                job.run()
            case CloseJob():
                self._forget((job.owner, job.slot_id))
                self._keeper.close(job)
            case OwnerGone():
                for key in list(self._slots):
                    if key[0] == job.owner:
                        self._forget(key)
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _open(self, job: OpenJob) -> None:
        is_translated = job.vocabulary is not None and job.vocabulary.translation is not None
        growth = growth_of(job.params)
        why = growth.refusal(self._drafter, is_translated=is_translated)
        if why is not None:
            self._engine.answer(partial(job.respond, JobError(Fault.INVALID, why)))
            return
        slot = self._keeper.open(job)
        if slot is None:
            return
        shares = SlotShares(self._shares.setdefault(growth.shares_key(job.params), RankShares()))
        growing = DraftSlot(job, slot, shares)
        growing.tree = self._growth(growing)
        if self._open_ahead is not None and not is_translated:
            growing.ahead = self._open_ahead(job, slot)
        self._slots[slot.key] = growing

    def _growth(self, growing: DraftSlot) -> Growth:
        params, speculation = growing.job.params, growing.job.speculation
        topk, max_fed = None, MAX_FED
        if not params.determined:
            num_ids = self._keeper.vocab_size_of(growing.slot)
            if speculation.draft_logprobs is DraftLogprobs.AUTO:
                num_slots = sum(not other.slot.params.determined for other in self._slots.values())
                is_whole = num_ids * num_slots <= MAX_WHOLE_IDS
            else:
                is_whole = speculation.draft_logprobs is DraftLogprobs.FULL
            topk = None if is_whole else speculation.draft_topk
            max_fed = min(MAX_FED, MAX_DISTRIBUTION_BYTES // (BYTES_AN_ID * (topk or num_ids)))
        shares, ends = growing.shares, self._keeper.eos_token_ids
        return growth_of(params)(GrowthSetup(growing.slot, speculation, shares, self._drafter, topk, max_fed, ends))

    def _forget(self, key: SlotKey) -> None:
        growing = self._slots.pop(key, None)
        if growing is not None and growing.ahead is not None:
            growing.ahead.close()

    def _truncate(self, job: TruncateJob) -> None:
        """Truncate a slot that does not grow.

        For a growing slot an Advance brings it to the same length, and the draft tokens under the committed ones stay.
        After a stop string the slot stops growing.
        """
        growing = self._slots.get((job.owner, job.slot_id))
        if growing is not None and job.reason == "stop":
            growing.is_growing = False
        self._keeper.truncate(job, keeps=growing is not None and growing.is_growing)

    def _advance(self, job: AdvanceJob) -> None:
        growing = self._slots.get((job.owner, job.slot_id))
        if growing is None:
            return  # closed meanwhile, or refused: the gateway has the answer or will get it
        slot, is_new_lease = growing.slot, not growing.is_growing or job.ticket != growing.ticket
        new_len = job.base_len + len(job.decided)
        if not is_new_lease and new_len <= growing.tree.known_len and not job.wrong:
            return  # late, or repeated
        error = growing.tree.check(job.base_len, job.decided, self._keeper.check_commit)
        if job.wrong:
            error = JobError(Fault.INVALID, job.wrong)
        if error is not None:
            self._tell(growing, error)
            return
        is_kept = growing.tree.continues(job.base_len, job.decided, is_new_lease=is_new_lease)
        if not is_kept:
            self._begin(growing, job)
        elif new_len > growing.tree.known_len:
            self._go_on(growing, job)
        if growing.ahead is not None:
            growing.ahead.commit_from(job.base_len, job.decided)
        slot.asked_s = time.monotonic()
        if job.is_missed or (is_new_lease and is_kept):
            growing.tree.resend()
        growing.ticket, growing.is_growing = job.ticket, True
        growing.num_urgent = 0 if growing.tree.has_drafts else NUM_URGENT
        self._ask_rows(growing)
        self._pusher.push_due(growing)

    def _begin(self, growing: DraftSlot, job: AdvanceJob) -> None:
        """Commit the decided tokens and start a new tree.

        The old tree's nodes must leave the cache before the cache is compared with the committed tokens. Nodes are
        cached in the order in which they were fed, so their ids may equal those of the committed tokens while their
        keys and values differ.
        """
        slot = growing.slot
        slot.truncate(len(slot.committed) + 1)
        slot.commit_from(job.base_len, job.decided)
        slot.settle()
        growing.tree, growing.block = self._growth(growing), None

    def _go_on(self, growing: DraftSlot, job: AdvanceJob) -> None:
        tree, growing.block = growing.tree, None
        num_fed, is_known = len(tree.fed), self._drafter.knows(growing)
        keep = tree.go_on(job.decided[tree.known_len - job.base_len :])
        if is_known:
            self._drafter.keep_fed(growing, num_fed, keep)
        else:
            growing.slot.settle()
            tree.restart()

    def _ask_rows(self, growing: DraftSlot) -> None:
        """Request the hidden states that the slot lacks from the target, whether they are on their way or lost."""
        job, slot = growing.job, growing.slot
        if isinstance(slot, HeadSlot) and slot.lacks_features:
            request = RowsRequest(growing.ticket, slot.next_position, slot.request_id)
            self._engine.answer(partial(self._request_rows, job.deliver_to, job.target_epoch, request))

    def _take_rows(self, job: RowsJob) -> None:
        """Pass hidden states to their slot.

        States of another ticket, of another epoch of the target, or of positions past the slot's maximum are dropped.
        """
        job.taken()
        for growing in self._slots.values():
            slot, is_current = growing.slot, growing.job.target_epoch == job.target_epoch
            if growing.ticket == job.ticket and is_current and isinstance(slot, HeadSlot):
                if job.start + len(job.rows) <= slot.max_len:
                    slot.take_features(job.start, job.rows, job.request_id)
                return

    def _tell(self, growing: DraftSlot, error: JobError) -> None:
        self._engine.answer(partial(growing.job.respond, error))

    # steps: choose, propose, grow, send

    def next_wake(self) -> float | None:
        return self._drafter.next_wake()

    def step(self, now: float) -> bool:
        """Feed the likeliest nodes of all slots, make their children and send them. Return whether anything was fed."""
        chosen = self._scheduler.choose(self._slots.values(), now)
        self._engine.flush()  # the drafter is about to work: send what is buffered first
        distributions = self._drafter.propose(chosen, now)
        if distributions is None:
            return False
        for distribution in distributions:
            distribution.tree.feed(distribution.node)
        slots = {growing.tree: growing for growing, _ in chosen}
        num_rows, began_s = len(distributions), now
        while distributions:
            for tree, why in grow(distributions).items():
                self._give_up(slots[tree], why)
            self._metrics.steps.labels(kind="grow").inc(len(distributions))
            ended_s = time.monotonic()
            for tree in {distribution.tree for distribution in distributions}:
                slots[tree].spent_s += ended_s - began_s
            for growing in slots.values():
                if not growing.slot.params.determined:  # a token's time must not depend on its id: it is sent
                    self._pusher.push_due(growing)  # before its id is looked at
            began_s = ended_s
            distributions = _followers(slots, distributions)
        for growing in slots.values():
            num_rows += self._end_ahead(growing)
            self._pusher.push_due(growing)
        seconds = time.monotonic() - now
        if num_rows:
            self._scheduler.note(num_rows, seconds)
        self._metrics.busy_seconds.inc(seconds)
        self._keeper.refresh_gauges()
        return True

    def _end_ahead(self, growing: DraftSlot) -> int:
        """Remove the look-ahead rows that became no nodes from the cache; return how many were fed."""
        if growing.ahead is None or not growing.is_growing:
            return 0
        num_fed, kept = growing.ahead.end_step()
        if len(kept) < num_fed:
            self._drafter.keep_fed(growing, num_fed, kept)
        self._metrics.guessed_tokens.labels(fate="drawn").inc(len(kept))
        self._metrics.guessed_tokens.labels(fate="dropped").inc(num_fed - len(kept))
        return num_fed

    def fail_step(self, error: Exception) -> None:
        """Close every growing slot: its cache may be wrong. The gateway opens it again."""
        for growing in list(self._slots.values()):
            if growing.is_growing:
                self._give_up(growing, f"the draft's step failed: {error}")

    def _give_up(self, growing: DraftSlot, why: str) -> None:
        self._tell(growing, JobError(Fault.INTERNAL, why))
        growing.slot.distrust()
        growing.is_growing = False
        del self._slots[growing.slot.key]
        self._keeper.close(CloseJob(*growing.slot.key))


def _followers(slots: Mapping[Growth, DraftSlot], distributions: Sequence[NodeDistribution]) -> list[NodeDistribution]:
    found = list[NodeDistribution]()
    for distribution in distributions:
        growing = slots[distribution.tree]
        if growing.ahead is not None and growing.is_growing:
            following = growing.ahead.follow(distribution)
            if following is not None:
                found.append(following)
    return found
