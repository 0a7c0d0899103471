"""The target's engine worker: waits for proposals within their budgets, verifies all that are ready in one forward.

A batch never waits for one slot's proposal: slots that are ready go, the others wait on. Runs on the engine thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from outrider.engine.acceptance import accept_greedy, accept_rejection
from outrider.engine.model_runner import ModelRunner
from outrider.engine.noise import Purpose
from outrider.engine.sampling import LogitRow, argmax, distributions, process, top_logprobs
from outrider.engine.step_plan import Row
from torch import Tensor

from outrider.engine.engine_thread import EngineThread
from outrider.engine.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, TruncateJob
from outrider.engine.slot_keeper import Piece, SlotKeeper, needs_prefill
from outrider.engine.slot_noise import slot_uniforms
from outrider.engine.slots import Slot
from outrider.engine.wire_tensors import decode_rows
from outrider.wire.codec import BadTensor
from outrider.wire.log import get_logger
from outrider.wire.metrics import WorkerMetrics
from target_service.commit import commit_tokens
from target_service.jobs import Fallback, Kind, Logprobs, Timings, Verdict, VerifyJob
from target_service.tickets import Proposal, TicketTable

log = get_logger(__name__)


@dataclass(slots=True)
class Waiting:
    """A verify that has arrived and not been answered."""

    job: VerifyJob
    slot: Slot
    proposal: Proposal | None
    """None for a plain step."""
    runnable_s: float | None = None
    """When all committed tokens but the last were in the cache: the wait budget runs from here."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A verify that goes into the next forward."""

    waiting: Waiting
    draft_ids: list[int]
    draft_log_probs: Tensor | None
    """[K, V] float32; None for greedy and plain."""
    fallback: Fallback | None

    @property
    def slot(self) -> Slot:
        return self.waiting.slot


class Verifier:
    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper,
        tickets: TicketTable,
        engine: EngineThread,
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
    ) -> None:
        self._runner = runner
        self._keeper = keeper
        self._tickets = tickets
        self._engine = engine
        self._metrics = metrics
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: dict[tuple[int, int], Waiting] = {}
        self._in_step: list[Ready] = []
        self._pieces: list[Piece] = []

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case VerifyJob():
                self._verify(job)
            case OpenJob():
                self._cancel(job.owner, job.slot_id, "the slot was opened again")
                self._keeper.open(job)
            case TruncateJob():
                self._keeper.truncate(job)
            case CloseJob():
                self._cancel(job.owner, job.slot_id, "the slot was closed")
                self._keeper.close(job)
            case OwnerGone():
                for owner, slot_id in [key for key in self._waiting if key[0] == job.owner]:
                    self._cancel(owner, slot_id, "the gateway's stream ended")
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _verify(self, job: VerifyJob) -> None:
        self._cancel(job.owner, job.slot_id, "a newer verify came for the slot")
        slot = self._keeper.commit(job.owner, job.slot_id, job.base_len, job.committed_ids)
        if isinstance(slot, JobError):
            if job.num_draft_tokens:
                self._tickets.finish(job.ticket)
            self._answer(job, slot)
            return
        proposal = None
        if job.num_draft_tokens:
            committed_len, now = len(slot.committed), time.monotonic()
            proposal = self._tickets.expect(job.ticket, job.owner, committed_len, job.num_draft_tokens, now)
        self._waiting[job.owner, job.slot_id] = Waiting(job, slot, proposal)

    def _cancel(self, owner: int, slot_id: int, why: str) -> None:
        waiting = self._waiting.pop((owner, slot_id), None)
        if waiting is not None:
            self._finish_ticket(waiting)
            self._answer(waiting.job, JobError(Fault.CANCELLED, f"verify cancelled: {why}"))

    def _finish_ticket(self, waiting: Waiting) -> None:
        if waiting.proposal is not None:
            self._tickets.finish(waiting.proposal.ticket)

    def _answer(self, job: VerifyJob, result: Verdict | JobError) -> None:
        self._engine.answer(lambda: job.respond(result))

    # steps

    def next_wake(self) -> float | None:
        """The earliest end of a wait budget, or of a parked proposal's life."""
        times = [w.runnable_s + w.job.wait_budget_s for w in self._waiting.values() if w.runnable_s is not None]
        expiry = self._tickets.next_expiry()
        return min([*times, *([] if expiry is None else [expiry])], default=None)

    def step(self, now: float) -> bool:
        """One forward over every ready verify and a bounded piece of the waiting prompts."""
        self._tickets.expire(now)
        prefill = self._keeper.pieces(self._keeper.table, self._max_prefill_tokens)
        ready = [r for waiting in list(self._waiting.values()) if (r := self._ready(waiting, now)) is not None]
        if not prefill and not ready:
            return False
        self._in_step, self._pieces = ready, prefill
        started = time.monotonic()
        rows = [self._row(r) for r in ready]
        logits = self._runner.forward([*rows, *(p.row for p in prefill)])  # [sum(K_b + 1), V] float32
        forwarded = time.monotonic()
        for piece in prefill:
            piece.slot.fed(piece.new_ids)
        for r in ready:
            r.slot.fed([*r.slot.committed, *r.draft_ids][len(r.slot.cached) :])
        if ready:
            self._decide(ready, logits, started, forwarded)
        self._in_step, self._pieces = [], []
        self._metrics.batch_size.observe(len(rows) + len(prefill))
        self._metrics.busy_seconds.inc(forwarded - started)
        self._keeper.refresh_gauges()
        return True

    def fail_step(self, error: Exception) -> None:
        for ready in self._in_step:
            waiting = ready.waiting
            self._waiting.pop((waiting.job.owner, waiting.job.slot_id), None)
            self._finish_ticket(waiting)
            self._answer(waiting.job, JobError(Fault.INTERNAL, f"the target's step failed: {error}"))
        for piece in self._pieces:  # without its KV the slot is of no use; its verify will be told it is unknown
            owner, slot_id = piece.slot.key
            self._cancel(owner, slot_id, f"feeding the prompt failed: {error}")
            self._keeper.close(CloseJob(owner, slot_id))
        self._in_step, self._pieces = [], []

    def _ready(self, waiting: Waiting, now: float) -> Ready | None:
        """Decide whether this verify goes now, and with which drafts."""
        if needs_prefill(waiting.slot):
            return None  # its prompt is still being fed
        if waiting.runnable_s is None:
            waiting.runnable_s = now
        proposal = waiting.proposal
        if proposal is None:
            return Ready(waiting, [], None, None)
        if proposal.refused is not None:
            return self._refused(waiting, proposal.refused)
        if proposal.complete:
            return self._with_drafts(waiting, proposal)
        if now >= waiting.runnable_s + waiting.job.wait_budget_s:
            return Ready(waiting, [], None, Fallback.LATE)
        return None

    def _refused(self, waiting: Waiting, why: str) -> Ready:
        log.warning("refused a proposal for slot %d: %s", waiting.job.slot_id, why)
        self._metrics.proposals_refused.inc()
        return Ready(waiting, [], None, Fallback.REFUSED)

    def _with_drafts(self, waiting: Waiting, proposal: Proposal) -> Ready:
        params, draft_ids = waiting.slot.params, list(proposal.draft_ids)
        room = params.max_tokens - (len(waiting.slot.committed) - waiting.slot.num_prompt) - 1
        if len(draft_ids) > room:
            return self._refused(waiting, f"{len(draft_ids)} draft tokens, room for {room} before max_tokens")
        if params.greedy:
            return Ready(waiting, draft_ids, None, None)
        if not proposal.rows:
            return self._refused(waiting, "distributions are missing and the temperature is not 0")
        try:
            start, parts = 0, []
            for rows in proposal.rows:
                ids = draft_ids[start : start + rows.num_rows]
                parts.append(decode_rows(rows, self._runner.facts.vocab_size, ids, self._runner.device))
                start += rows.num_rows
            return Ready(waiting, draft_ids, torch.cat(parts), None)
        except BadTensor as error:
            return self._refused(waiting, str(error))

    def _row(self, ready: Ready) -> Row:
        slot = ready.slot
        return Row(slot.table, [*slot.committed, *ready.draft_ids], len(slot.cached), len(ready.draft_ids) + 1)

    # acceptance

    def _decide(self, ready: list[Ready], logits: Tensor, started: float, forwarded: float) -> None:
        """Accept, commit and answer. logits: [sum(K_b + 1), V] float32, slots in order."""
        states = [self._keeper.sampling_state(r.slot) for r in ready]
        rows = [
            LogitRow(state, tuple(r.draft_ids[:j]))
            for r, state in zip(ready, states, strict=True)
            for j in range(len(r.draft_ids) + 1)
        ]
        processed = process(logits[: len(rows)], rows)
        outcomes = self._outcomes(ready, processed, rows)
        start = 0
        decided = time.monotonic()
        for r, (num_accepted, next_id) in zip(ready, outcomes, strict=True):
            raw = logits[start : start + len(r.draft_ids) + 1]
            start += len(r.draft_ids) + 1
            timings = self._timings(r.waiting, started, forwarded, decided, len(ready))
            self._commit(r, raw, num_accepted, next_id, timings)

    def _outcomes(self, ready: list[Ready], processed: Tensor, rows: list[LogitRow]) -> list[tuple[int, int]]:
        """(num_accepted, next id) per slot; greedy and sampled slots go through their own rule."""
        offsets = [0]
        for r in ready:
            offsets.append(offsets[-1] + len(r.draft_ids) + 1)
        outcomes: list[tuple[int, int]] = [(0, 0)] * len(ready)
        for greedy in (True, False):
            group = [b for b, r in enumerate(ready) if r.slot.params.greedy is greedy]
            if not group:
                continue
            batch = _Batch([ready[b] for b in group], [offsets[b] for b in group], processed.device)
            found = self._greedy(batch, processed) if greedy else self._sampled(batch, processed, rows)
            for b, outcome in zip(group, found, strict=True):
                outcomes[b] = outcome
        return outcomes

    def _greedy(self, batch: _Batch, processed: Tensor) -> list[tuple[int, int]]:
        target_ids = argmax(processed)[batch.row_index]  # [B, K+1] int64
        outcome = accept_greedy(target_ids, batch.draft_ids, batch.num_drafted)
        return list(zip(outcome.num_accepted.tolist(), outcome.next_ids.tolist(), strict=True))

    def _sampled(self, batch: _Batch, processed: Tensor, rows: list[LogitRow]) -> list[tuple[int, int]]:
        used = batch.used_rows()  # rows of sampled slots only
        target = processed.new_full((len(rows), processed.shape[1]), -torch.inf)
        target[used] = distributions(processed[used], [rows[i] for i in used])
        target_log_probs = target[batch.row_index]  # [B, K+1, V]
        draft_log_probs = batch.draft_log_probs(processed.shape[1])  # [B, K, V]
        outcome = accept_rejection(
            target_log_probs,
            draft_log_probs,
            batch.draft_ids,
            batch.num_drafted,
            batch.uniforms(Purpose.ACCEPT)[:, :-1],
            batch.uniforms(Purpose.RECOVER)[:, :-1],
            batch.uniforms(Purpose.TARGET),
        )
        return list(zip(outcome.num_accepted.tolist(), outcome.next_ids.tolist(), strict=True))

    def _commit(self, r: Ready, raw: Tensor, num_accepted: int, next_id: int, timings: Timings) -> None:
        slot, job = r.slot, r.waiting.job
        committed_len = len(slot.committed)
        commit = commit_tokens(
            slot.params,
            self._runner.facts.eos_token_ids,
            committed_len - slot.num_prompt,
            r.draft_ids,
            num_accepted,
            next_id,
        )
        slot.commit_from(committed_len, commit.token_ids)
        verdict = Verdict(
            committed_len=committed_len,
            token_ids=commit.token_ids,
            kinds=commit.kinds,
            num_drafted=len(r.draft_ids),
            num_accepted=num_accepted,
            finish=commit.finish,
            stop_token_id=commit.stop_token_id,
            logprobs=_logprobs(raw, commit.token_ids, slot.params.num_logprobs),
            fallback=r.fallback,
            timings=timings,
        )
        del self._waiting[job.owner, job.slot_id]
        self._finish_ticket(r.waiting)
        self._answer(job, verdict)
        self._metrics.steps.labels(kind="verify" if Kind.PLAIN not in commit.kinds else "plain").inc()

    def _timings(self, waiting: Waiting, started: float, forwarded: float, decided: float, batch: int) -> Timings:
        arrived, proposal = waiting.job.arrived_s, waiting.proposal
        if proposal is None:
            wait_s = 0.0
        else:
            ended = started if proposal.completed_s is None else proposal.completed_s
            wait_s = max(0.0, min(ended, started) - arrived)
        return Timings(wait_s, max(0.0, started - arrived - wait_s), forwarded - started, decided - forwarded, batch)


class _Batch:
    """Slots of one acceptance rule, padded to the widest."""

    def __init__(self, ready: list[Ready], offsets: list[int], device: torch.device) -> None:
        self._ready = ready
        self._device = device
        counts = [len(r.draft_ids) for r in ready]
        width = max(counts)
        self.num_drafted = torch.tensor(counts, device=device)  # [B]
        padded = [[*r.draft_ids, *[0] * (width - len(r.draft_ids))] for r in ready]
        self.draft_ids = torch.tensor(padded, dtype=torch.int64, device=device).view(len(ready), width)  # [B, K]
        # Rows past a slot's own K repeat its last one; the rules never look at them.
        self._rows = [[start + min(j, n) for j in range(width + 1)] for start, n in zip(offsets, counts, strict=True)]
        self.row_index = torch.tensor(self._rows, device=device)  # [B, K+1]

    def used_rows(self) -> list[int]:
        return sorted({row for rows in self._rows for row in rows})

    def draft_log_probs(self, vocab_size: int) -> Tensor:
        """[B, K, V] float32; padding rows are -inf."""
        width = self.draft_ids.shape[1]
        out = torch.full((len(self._ready), width, vocab_size), -torch.inf, device=self._device)
        for b, r in enumerate(self._ready):
            if r.draft_log_probs is not None:
                out[b, : len(r.draft_ids)] = r.draft_log_probs
        return out

    def uniforms(self, purpose: Purpose) -> Tensor:
        """[B, K+1] float64, one per position that may be decided."""
        width = self.draft_ids.shape[1] + 1
        params = [r.slot.params for r in self._ready for _ in range(width)]
        positions = [len(r.slot.committed) + j for r in self._ready for j in range(width)]
        return slot_uniforms(params, positions, purpose, self._device).view(-1, width)


def _logprobs(raw: Tensor, token_ids: tuple[int, ...], num_logprobs: int | None) -> tuple[Logprobs, ...]:
    """Of the committed tokens, from raw logits [K + 1, V]."""
    if num_logprobs is None:
        return ()
    chosen = torch.tensor(token_ids, device=raw.device)
    logprob, ids, values = top_logprobs(raw[: len(token_ids)], chosen, num_logprobs)
    triples = zip(logprob.tolist(), ids.tolist(), values.tolist(), strict=True)
    return tuple(Logprobs(own, tuple(best), tuple(best_values)) for own, best, best_values in triples)
