"""The target's engine worker: verifies all that is ready in one forward, and feeds prompts in pieces beside it.

`waiting` decides which verifies are ready, the engine's `scheduler` which of them run, `decide` what is accepted;
`commit_tokens` cuts it. Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.chain import Chain
from outrider.engine.sampling.penalties import NonFiniteLogits
from outrider.engine.sampling.tree_acceptance import ROOT
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, SlotKey, TruncateJob
from outrider.engine.worker.scheduler import StepScheduler, Turn
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import TokenKind
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from target_service.decide import decide
from target_service.decide_on_device import Decided
from target_service.jobs import Fallback, Finish, Logprobs, Timings, Verdict, VerifyJob
from target_service.own_drafts import OwnDrafts
from target_service.returning import Returning
from target_service.tickets import TicketTable
from target_service.waiting import ReadyVerify, Waiting, WaitingRoom


@dataclass(frozen=True, slots=True)
class Commit:
    """The tokens that one round commits."""

    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    finish: Finish | None
    stop_token_id: int | None


def kind_of_next(num_drafted: int, all_kept: bool) -> TokenKind:
    """Return the kind of the target's own token. all_kept: to the end of the proposal, or of a tree's branch."""
    if not num_drafted:
        return TokenKind.PLAIN
    return TokenKind.BONUS if all_kept else TokenKind.RECOVERED


def commit_tokens(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    num_output: int,
    accepted_ids: Sequence[int],
    next_id: int,
    last: TokenKind,
) -> Commit:
    """Commit accepted drafts and the target's own token, cut at the first end-of-sequence or stop id or max_tokens.

    `num_output` counts the output tokens before this round; `last` is the kind of next_id. A stop id stays as the last
    token; text leaves it out.
    """
    tokens = [*accepted_ids, next_id]
    kinds = [*[TokenKind.ACCEPTED] * len(accepted_ids), last]
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    for index, token_id in enumerate(tokens):
        num_now = num_output + index + 1
        if token_id in stops and num_now > params.min_tokens:
            return Commit(tuple(tokens[: index + 1]), tuple(kinds[: index + 1]), Finish.STOP, token_id)
        if num_now >= params.max_tokens:
            return Commit(tuple(tokens[: index + 1]), tuple(kinds[: index + 1]), Finish.LENGTH, None)
    return Commit(tuple(tokens), tuple(kinds), None, None)


class Verifier:
    """Runs the target's jobs and steps."""

    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        tickets: TicketTable,
        engine: EngineThread,
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
        own_drafts: OwnDrafts,
    ) -> None:
        self._runner = runner
        self._keeper = keeper
        self._tickets = tickets
        self._engine = engine
        self._metrics = metrics
        self._own_drafts = own_drafts
        self._max_step_drafts = max_prefill_tokens  # the rest of a step goes plain: nobody is to wait longer for it
        self._turns = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)
        rest = runner.facts.vocab_size, self._answer, self._draft, runner.tree_refusal
        self._room = WaitingRoom(tickets, metrics, *rest)
        self._returning = Returning(self._room.ready_s)
        self._held_until: float | None = None  # when to call `step` again, after one that held everything back
        self._in_step: list[ReadyVerify] = []
        self._rows: dict[SlotKey, Row] = {}  # rows of the current step
        self._going_on: list[SlotKey] = []  # plain slots of the step that have not finished
        self._drafting_on: list[SlotKey] = []  # slots of the step with proposals that have not finished
        self._turn: Turn | None = None
        self._num_fed = (0, 0, 0)  # tokens of the step, how many of them are prompts', and its number

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case VerifyJob():
                self._verify(job)
            case OpenJob():
                self._open(job)
            case TruncateJob():
                self._keeper.truncate(job)
            case CloseJob():
                self._returning.gone((job.owner, job.slot_id))
                self._room.cancel(job.owner, job.slot_id, "verify cancelled: the slot was closed")
                self._own_drafts.close((job.owner, job.slot_id))
                self._keeper.close(job)
            case OwnerGone():
                self._returning.owner_gone(job.owner)
                self._room.cancel_owner(job.owner, "verify cancelled: the gateway's stream ended")
                self._own_drafts.close_owner(job.owner)
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _open(self, job: OpenJob) -> None:
        self._room.cancel(job.owner, job.slot_id, "verify cancelled: the slot was opened again")
        refused = self._own_drafts.refuses(job.drafter)
        if refused is not None:
            self._engine.answer(lambda: job.respond(refused))
            return
        slot = self._keeper.open(job)
        if slot is not None:
            self._own_drafts.open(job, slot)

    def _verify(self, job: VerifyJob) -> None:
        repeated = job.ticket if job.num_draft_tokens else None
        self._room.cancel(job.owner, job.slot_id, "verify cancelled: a newer one came", keep_ticket=repeated)
        slot = self._keeper.commit(job.owner, job.slot_id, job.base_len, job.committed_ids)
        if isinstance(slot, JobError):
            if job.num_draft_tokens:
                self._tickets.finish(job.ticket, "cancelled")
            self._answer(job, slot)
            return
        self._own_drafts.commit(job)
        if job.num_own_draft_tokens and not self._own_drafts.follows(slot.key):
            why = f"num_own_draft_tokens is {job.num_own_draft_tokens}, and slot {job.slot_id} has no drafter"
            self._answer(job, JobError(Fault.INVALID, f"{why}; open it with one"))
            return
        self._room.add(job, slot)
        with_drafts = job.num_draft_tokens > 0
        self._returning.arrived(slot.key, with_drafts, job.arrived_s + (job.wait_budget_s if with_drafts else 0.0))

    def _draft(self, slot: Slot, num_draft_tokens: int) -> Chain:
        return self._own_drafts.draw(slot, self._keeper.sampling_state(slot), num_draft_tokens)

    def _answer(self, job: VerifyJob, result: Verdict | JobError) -> None:
        self._engine.answer(lambda: job.respond(result))

    # steps

    def next_wake(self) -> float | None:
        if self._held_until is not None:  # even if it has passed: later arrivals have not been considered
            return self._held_until
        times = (self._room.next_wake(), self._turns.next_wake(time.monotonic()))
        return min((at for at in times if at is not None), default=None)

    def step(self, now: float) -> bool:
        """Run one forward over every ready verify, and the pieces of prompts that fit beside them."""
        self._held_until = self._returning.wait_until(now)
        if self._held_until is not None:
            return False
        turn = self._turn = self._turns.take(self._room.step_requests(now), now, feed_all=True)
        self._room.not_runnable(turn.starved)
        self._in_step = self._room.take(turn.running, self._max_step_drafts)
        rows = [*(_row(r) for r in self._in_step), *(p.row for p in turn.pieces)]
        if not rows:
            return turn.worked
        num_run_tokens = sum(row.num_new for row in rows[: len(self._in_step)])
        num_prompt_tokens = sum(p.row.num_new for p in turn.pieces)
        self._num_fed = (num_run_tokens + num_prompt_tokens, num_prompt_tokens, self._num_fed[2] + 1)
        started = time.monotonic()
        logits = self._runner.forward(rows)  # [sum(K_b + 1), V] float32; pieces have none
        self._rows = {r.slot.key: row for r, row in zip(self._in_step, rows, strict=False)}
        for r in self._in_step:
            r.slot.fed(self._rows[r.slot.key].new_ids)
        self._going_on, self._drafting_on = [], []
        if self._in_step:
            self._decide(self._in_step, logits, started)
        else:
            self._runner.forward_s()  # nothing else waits for pieces of prompts
        ended = time.monotonic()
        self._turns.done(turn, num_run_tokens, ended - started)
        if self._in_step:
            step_s = None if turn.pieces else ended - started
            joined_saves_s = self._turns.joined_saves_s(num_run_tokens)
            self._returning.answered(self._going_on, self._drafting_on, ended, step_s, joined_saves_s)
        self._in_step, self._rows, self._turn = [], {}, None
        self._metrics.batch_size.observe(len(rows))
        self._metrics.busy_seconds.inc(ended - started)
        self._keeper.refresh_gauges()
        return True

    def fail_step(self, error: Exception) -> None:
        """Answer the verifies of the step that have no verdict yet; their slots stay, and are fed anew."""
        for r in self._in_step:
            self._room.cancel(*r.slot.key, f"the target's step failed: {error}", Fault.INTERNAL)
            r.slot.distrust()
        for piece in () if self._turn is None else self._turn.pieces:
            # Without its KV the slot is of no use; its next verify will be answered with UNKNOWN_SLOT.
            self._room.cancel(*piece.slot.key, f"feeding the prompt failed: {error}", Fault.INTERNAL)
            piece.slot.distrust()
            self._own_drafts.drop(piece.slot.key)
            self._keeper.close(CloseJob(*piece.slot.key))
        self._in_step, self._rows, self._turn = [], {}, None

    # commit

    def _decide(self, ready: list[ReadyVerify], logits: Tensor, started: float) -> None:
        """Accept, commit and answer. logits: [sum(K_b + 1), V] float32, slots in order."""
        try:
            states = [self._keeper.sampling_state(r.slot) for r in ready]
            decided = decide(ready, states, logits)
        except NonFiniteLogits as error:
            self._decide_without(error, ready, logits, started)
            return
        forwarded, ended = started + self._runner.forward_s(), time.monotonic()
        for r, own in zip(ready, decided, strict=True):
            timings = _timings(r.waiting, started, forwarded, ended, len(self._in_step), self._num_fed)
            self._commit(r, own, timings)

    def _decide_without(self, error: NonFiniteLogits, ready: list[ReadyVerify], logits: Tensor, started: float) -> None:
        """Decide the others: NaN in one slot's logits fails that request alone."""
        raw = logits.split([len(r.draft_ids) + 1 for r in ready])  # [K_b + 1, V] each
        slot_of_row = [b for b, own in enumerate(raw) for _ in range(len(own))]
        bad = {slot_of_row[row] for row in error.rows}
        for b in bad:
            ready[b].slot.distrust()
            self._room.cancel(*ready[b].slot.key, f"verify failed: {error.message}", Fault.INTERNAL)
        sound = [b for b in range(len(ready)) if b not in bad]
        if sound:
            self._decide([ready[b] for b in sound], torch.cat([raw[b] for b in sound]), started)

    def _commit(self, r: ReadyVerify, decided: Decided, timings: Timings) -> None:
        slot = r.slot
        committed_len = len(slot.committed)
        num_output = committed_len - slot.num_prompt
        eos_token_ids = self._runner.facts.eos_token_ids
        accepted_ids = r.draft_ids[: decided.num_accepted]
        if r.tree is not None:
            accepted_ids = [r.draft_ids[node] for node in decided.path]
            self._keep_path(r, decided.path)
        commit = commit_tokens(
            slot.params,
            eos_token_ids,
            num_output,
            accepted_ids,
            decided.next_id,
            kind_of_next(len(r.draft_ids), _all_kept(r, decided)),
        )
        slot.commit_from(committed_len, commit.token_ids)
        has_next = self._own_drafts.append(slot.key, commit.token_ids)
        verdict = Verdict(
            committed_len=committed_len,
            token_ids=commit.token_ids,
            kinds=commit.kinds,
            num_drafted=len(r.draft_ids),
            num_accepted=decided.num_accepted,
            finish=commit.finish,
            stop_token_id=commit.stop_token_id,
            logprobs=tuple(Logprobs(*found) for found in decided.reported[: len(commit.token_ids)]),
            fallback=r.fallback,
            timings=timings,
            num_cached_tokens=slot.num_adopted or 0,
            drafter_has_next=has_next and commit.finish is None,
        )
        slot.asked_s = time.monotonic()  # the next verify is on its way, however long this one took
        self._room.done(r)
        if commit.finish is None:
            (self._going_on if r.waiting.proposal is None else self._drafting_on).append(slot.key)
            if r.fallback is Fallback.LATE:
                self._returning.late(slot.key)
        self._answer(r.waiting.job, verdict)
        self._metrics.steps.labels(kind="verify" if TokenKind.PLAIN not in commit.kinds else "plain").inc()

    def _keep_path(self, r: ReadyVerify, path: Sequence[int]) -> None:
        """Keep only this path of the tree that was fed in the cache."""
        row = self._rows[r.slot.key]
        first = row.num_new - len(r.draft_ids)  # committed tokens before the tree
        kept = [*range(first), *(first + node for node in path)]
        self._runner.compact(row, kept)
        r.slot.compacted(row.num_cached, [row.new_ids[place] for place in kept])


def _row(ready: ReadyVerify) -> Row:
    slot, tree = ready.slot, ready.tree
    tail = slot.committed[len(slot.cached) :]
    parents = None
    if tree is not None:  # the path to each of its nodes begins with the committed tokens before the tree
        parents = [*range(-1, len(tail) - 1), *(len(tail) + parent for parent in tree.parents)]
    new_ids = [*tail, *ready.draft_ids]
    return Row(slot.table, new_ids, len(slot.cached), len(ready.draft_ids) + 1, slot.cached, parents)


def _all_kept(r: ReadyVerify, decided: Decided) -> bool:
    """Return whether drafts were kept up to the end of the proposal, or of one branch of a tree."""
    if r.tree is None:
        return decided.num_accepted == len(r.draft_ids)
    return not r.tree.children(decided.path[-1] if decided.path else ROOT)


def _timings(
    waiting: Waiting, started: float, forwarded: float, ended: float, batch: int, num_fed: tuple[int, int, int]
) -> Timings:
    arrived, proposal = waiting.job.arrived_s, waiting.proposal
    if proposal is None:
        wait_s = 0.0
    else:
        completed = started if proposal.completed_s is None else proposal.completed_s
        wait_s = max(0.0, min(completed, started) - arrived)
    queue_s = max(0.0, started - arrived - wait_s)
    return Timings(wait_s, queue_s, forwarded - started, ended - forwarded, batch, *num_fed)
