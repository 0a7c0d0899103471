"""Apply messages to slots, for both workers: open, commit, truncate, close. Runs on the engine thread.

It answers jobs through the engine thread and has no model; `scheduler.py` decides which slots are in a forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, CloseOwnerJob, JobError, JobFault, OpenJob, SlotOpened, TruncateJob
from outrider.engine.worker.open_slots import BareSlot, MissingTokens, OpenSlots, S
from outrider.wire.errors import InvalidRequest, OutriderError, Overloaded
from outrider.wire.requests.params import check_token_ids
from outrider.wire.telemetry.metrics import WorkerMetrics


class SlotKeeper(Generic[S]):
    """Keeper of a worker's open slots and of their sampling states. It opens, commits, truncates and closes slots as
    jobs ask.
    """

    def __init__(
        self,
        table: OpenSlots[S],
        engine: EngineThread,
        metrics: WorkerMetrics,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.table = table
        self._engine = engine
        self._metrics = metrics
        self._vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._states: dict[tuple[int, int], SamplingState] = {}
        self._sizes: dict[tuple[int, int], int] = {}
        """Number of ids of the vocabulary of each slot's messages."""

    def open(self, job: OpenJob) -> S | None:
        """Open a slot for the job, answer the job, and return the slot. If the slot cannot be opened, answer with the
        error and return None.
        """
        size = self._vocab_size
        ends = self.eos_token_ids
        translation = None
        if job.vocabulary is not None:
            size = job.vocabulary.size
            ends = job.vocabulary.eos_token_ids
            translation = job.vocabulary.translation
        try:
            check_token_ids("committed_ids", job.committed_ids, size)
            job.params.check(size)
            slot = self.table.open(
                job.owner,
                job.slot_id,
                job.committed_ids,
                job.num_prompt,
                job.params,
                job.cache_salt,
                job.source_ids,
                translation,
                job.corpus_id,
            )
        except Overloaded as error:
            self._respond(job.respond, JobError(JobFault.EXHAUSTED, error.message))
            return None
        except OutriderError as error:
            self._respond(job.respond, JobError(JobFault.INVALID, error.message))
            return None
        slot.last_request_s = time.monotonic()
        slot.scheduling = job.scheduling
        prompt = job.committed_ids[: job.num_prompt]
        self._states[slot.key] = SamplingState(job.params, prompt, ends, job.grammar)
        self._sizes[slot.key] = size
        self._respond(job.respond, SlotOpened(len(slot.committed)))
        self.refresh_gauges()
        return slot

    def _respond(self, respond: Callable[[SlotOpened | JobError], None], result: SlotOpened | JobError) -> None:
        self._engine.answer(lambda: respond(result))

    def commit(self, owner: int, slot_id: int, base_len: int, ids: Sequence[int]) -> S | JobError:
        """Set the slot's committed tokens to committed[:base_len] + ids, and truncate its cache to match. Return the
        slot, or the error if the slot is not open or cannot have these tokens.
        """
        slot = self.table.get(owner, slot_id)
        if slot is None:
            return JobError(JobFault.UNKNOWN_SLOT, f"slot {slot_id} is not open here; open it again")
        wrong = self.check_commit(slot, base_len, ids)
        if wrong is not None:
            return wrong
        slot.commit_from(base_len, ids)
        slot.settle()
        slot.last_request_s = time.monotonic()
        return slot

    def check_commit(self, slot: BareSlot, base_len: int, ids: Sequence[int]) -> JobError | None:
        """Return the error if the slot cannot be set to committed[:base_len] + ids; None if it can."""
        try:
            if base_len + len(ids) >= slot.max_len:  # the slot may be full, but then no token can be requested of it
                raise InvalidRequest(
                    f"base_len {base_len} and {len(ids)} committed ids make {base_len + len(ids)} tokens, "
                    f"prompt and max_tokens are {slot.max_len}: no token is left to make"
                )
            check_token_ids("committed_ids", list(ids), self._sizes[slot.key])
            slot.check_commit(base_len, len(ids))
        except MissingTokens as behind:
            return JobError(
                JobFault.BEHIND, f"slot {slot.key[1]} knows {behind.committed_len} tokens", behind.committed_len
            )
        except InvalidRequest as error:
            return JobError(JobFault.INVALID, error.message)
        return None

    def truncate(self, job: TruncateJob, *, keeps: bool = False) -> None:
        """Truncate a slot's cache. A slot that is not open is ignored.

        `keeps`: whether to leave the cache as it is. Pass True for a target slot with a lease and for a draft slot
        whose tree grows: their steps truncate the cache to the committed tokens themselves.
        """
        self._metrics.truncates.labels(reason=job.reason).inc()
        slot = self.table.get(job.owner, job.slot_id)
        if slot is not None and not keeps:
            self._metrics.truncate_freed_blocks.inc(slot.truncate(job.committed_len))
            self.refresh_gauges()

    def close(self, job: CloseJob) -> None:
        """Free a slot. Closing a slot that is not open is harmless."""
        self._states.pop((job.owner, job.slot_id), None)
        self._sizes.pop((job.owner, job.slot_id), None)
        self.table.close(job.owner, job.slot_id)
        self.refresh_gauges()

    def close_owner(self, job: CloseOwnerJob) -> None:
        """Free all slots of an owner, i.e. of a gateway's stream that ended."""
        for key in list(self._states):
            if key[0] == job.owner:
                del self._states[key], self._sizes[key]
        self.table.close_owner(job.owner)
        self.refresh_gauges()

    def sampling_state(self, slot: BareSlot) -> SamplingState:
        """Return the sampling state of a slot, updated to its committed output."""
        state = self._states[slot.key]
        state.set_output(slot.committed[slot.num_prompt :])
        return state

    def vocab_size_of(self, slot: BareSlot) -> int:
        """Return the size of the vocabulary to which the token ids in the slot's messages belong."""
        return self._sizes[slot.key]

    def refresh_gauges(self) -> None:
        """Set the metrics of open slots and of cache blocks in use to their present numbers."""
        self._metrics.slots_in_use.set(self.table.num_in_use)
        self._metrics.kv_blocks_in_use.set(self.table.num_blocks_in_use)
        self._metrics.kv_blocks_cached.set(self.table.num_blocks_cached)
