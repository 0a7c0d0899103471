"""Both workers over a small model in this process: memory taken and given back, and prompts beside steps.

Whatever is taken from whom, the tokens are those of a pool that holds everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_service.jobs import Proposed, ProposeJob
from draft_service.proposer import Proposer
from outrider.drafting.ngram import Ngram
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, JobError, OpenJob
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import SlotTable, needs_prefill
from outrider.wire.kinds import Drafter, DraftLogprobs
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import TargetConfig
from target_service.jobs import Verdict, VerifyJob
from target_service.own_drafts import OwnDrafts
from target_service.tickets import DeliveryPart, TicketTable
from target_service.verifier import Verifier
from tests.tiny_models import tiny_llama

BLOCK_SIZE = 16
NUM_PROMPT, NUM_TOKENS, NUM_SLOTS = 40, 60, 8
BLOCKS_FOR_ONE = 7
SMALL, LARGE = 2 * BLOCKS_FOR_ONE + 3, NUM_SLOTS * BLOCKS_FOR_ONE
MAX_PREFILL = 64


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_runner(
        TargetConfig(
            model=tiny_llama(folder, sharpness=3.0),
            device="cpu",
            dtype="float32",
            kv_cache_tokens=LARGE * BLOCK_SIZE,
            max_slots=NUM_SLOTS,
            context_limit=None,
            attention_path="auto",
            batch_invariant=False,
        )
    )


class AtOnce(EngineThread):
    """Answers go out when they are made: the worker's methods are called from here."""

    def __init__(self) -> None:
        super().__init__(lambda engine: None, lambda answers: None)  # type: ignore[arg-type, return-value]

    def answer(self, send: Callable[[], None]) -> None:
        send()


class Base:
    """What either worker stands on, with a pool of so many blocks."""

    def __init__(self, runner: ModelRunner, num_blocks: int, *, prefix_caching: bool = True) -> None:
        self.pool = KVPool(num_blocks, BLOCK_SIZE)
        self.pool.prefix.enabled = prefix_caching
        runner.set_pool(self.pool)
        self.metrics, self.engine = WorkerMetrics("target"), AtOnce()
        self.table = SlotTable(self.pool, NUM_SLOTS, runner.facts.context_limit)
        self.keeper = SlotKeeper(self.table, self.engine, self.metrics, runner.facts.vocab_size, ())

    def metrics_of(self, kind: str) -> float:
        labels = {"worker": "target", "kind": kind}
        return float(self.metrics.registry.get_sample_value("outrider_worker_steps_total", labels) or 0)

    def count(self, name: str) -> float:
        return float(self.metrics.registry.get_sample_value(f"outrider_worker_{name}", {"worker": "target"}) or 0)


def prompt(slot: int, num_tokens: int = NUM_PROMPT) -> list[int]:
    return [2 + (7 * slot + 3 * i) % 300 for i in range(num_tokens)]


def open_job(slot: int, ids: list[int], **options: Any) -> OpenJob:
    params = SamplingParams(**{"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **options})

    def respond(result: object) -> None:
        assert not isinstance(result, JobError), result

    return OpenJob(1, slot, tuple(ids), len(ids), params, respond, deliver_to="nowhere:1", target_epoch=1)


class Target(Base):
    """A verifier, and gateways that send the next verify as soon as they have a verdict, with drafts now and then."""

    def __init__(self, runner: ModelRunner, num_blocks: int, **options: Any) -> None:
        super().__init__(runner, num_blocks, **options)
        self.tickets = TicketTable(64, 1 << 20, 10.0)
        self.own = OwnDrafts({Drafter.NGRAM: Ngram()}, runner.facts.vocab_size)
        rest = (MAX_PREFILL, self.own)
        self.verifier = Verifier(runner, self.keeper, self.tickets, self.engine, self.metrics, *rest)
        self.ids: dict[int, list[int]] = {}
        self.idle: list[int] = []
        self._num_rounds = 0

    def open(self, slot: int, ids: list[int], **options: Any) -> None:
        self.ids[slot] = list(ids)
        self.verifier.handle(open_job(slot, ids, **options))
        self.idle.append(slot)

    def ask(self, slot: int) -> None:
        """K = 3 every other round; drafts that repeat the last token are right sometimes."""
        room = len(self.ids[slot]) < NUM_PROMPT + NUM_TOKENS - 4
        self._ask(slot, 3 if (self._num_rounds + 1) % 2 and room else 0)

    def _ask(self, slot: int, k: int, num_own: int = 0) -> None:
        ids = self.ids[slot]
        self._num_rounds += 1
        if k:
            part = DeliveryPart(self._num_rounds, len(ids), 0, (ids[-1],) * k, k, None, 12)
            self.tickets.deliver(part, time.monotonic())

        def respond(result: Verdict | JobError) -> None:
            assert isinstance(result, Verdict), result
            ids.extend(result.token_ids)
            if result.finish is None:
                self.idle.append(slot)
            else:
                self.verifier.handle(CloseJob(1, slot))

        now = time.monotonic()
        job = VerifyJob(1, slot, 0, tuple(ids), k, self._num_rounds, 10.0, now, respond, num_own)
        self.verifier.handle(job)

    def round(self) -> bool:
        """Every gateway that has its verdict asks again, and one step. False when nothing is left to do."""
        idle, self.idle = self.idle, []
        for slot in idle:
            self.ask(slot)
        return self.verifier.step(time.monotonic())

    def run(self) -> dict[int, list[int]]:
        for _ in range(4000):
            if not self.round() and not self.table.num_in_use:
                return self.ids
        raise AssertionError(f"no end: {[(slot.key, len(slot.committed), slot.table.blocks) for slot in self.table]}")


class OwnTarget(Target):
    """It drafts for itself."""

    def open(self, slot: int, ids: list[int], **options: Any) -> None:
        self.ids[slot] = list(ids)
        self.verifier.handle(replace(open_job(slot, ids, **options), drafter=Drafter.NGRAM))
        self.idle.append(slot)

    def ask(self, slot: int) -> None:
        self._ask(slot, 0, 3)


def answers(target: Target, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    for slot, ids in prompts.items():
        target.open(slot, ids)
    return target.run()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_target_short_of_memory_says_the_same(runner: ModelRunner, prefix_caching: bool) -> None:
    prompts = {slot: prompt(slot) for slot in range(NUM_SLOTS)}
    expected = answers(Target(runner, LARGE), prompts)
    small = Target(runner, SMALL, prefix_caching=prefix_caching)
    assert answers(small, prompts) == expected
    assert small.count("preemptions_total") > 0
    assert small.count("slots_waiting") == 0
    assert small.pool.num_in_use == 0 and len(small.tickets) == 0
    assert (small.pool.num_cached > 0) is prefix_caching


def test_followers_outlive_their_slots_memory_and_not_their_slots(runner: ModelRunner) -> None:
    prompts = {slot: prompt(slot) for slot in range(NUM_SLOTS)}
    expected = answers(Target(runner, LARGE), prompts)
    small = OwnTarget(runner, SMALL)
    assert answers(small, prompts) == expected
    assert small.count("preemptions_total") > 0 and small.metrics_of("verify") > 0
    assert len(small.own) == 0 and small.pool.num_in_use == 0


def test_a_slot_whose_step_failed_goes_on_from_what_is_committed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(Target(runner, LARGE), {0: prompt(0)})[0]
    target = OwnTarget(runner, LARGE)
    target.open(0, prompt(0))
    for _ in range(6):
        target.round()
    failed: list[object] = []
    forward = runner.forward

    def fails(rows: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "forward", fails)
    while not target.idle:
        target.verifier.step(time.monotonic())
    now = time.monotonic()
    ids = tuple(target.ids[0])
    target.verifier.handle(VerifyJob(1, 0, 0, ids, 0, 0, 10.0, now, failed.append, 3))
    with pytest.raises(RuntimeError):
        target.verifier.step(now)
    target.verifier.fail_step(RuntimeError("out of memory"))
    assert isinstance(failed[0], JobError) and len(target.own) == 1
    monkeypatch.setattr(runner, "forward", forward)
    assert target.run()[0] == expected and len(target.own) == 0


def test_prompts_that_begin_alike_share_memory_and_say_the_same(runner: ModelRunner) -> None:
    prompts = {slot: [*prompt(0), *prompt(slot, 3)] for slot in range(NUM_SLOTS)}
    expected = {slot: answers(Target(runner, LARGE, prefix_caching=False), {0: prompts[slot]})[0] for slot in prompts}
    small = Target(runner, SMALL)
    assert answers(small, prompts) == expected
    assert small.count("prompt_tokens_total") == NUM_SLOTS * (NUM_PROMPT + 3)
    assert small.count("prefix_hit_tokens_total") >= (NUM_SLOTS - 2) * 32  # two began in the same step
    assert small.pool.num_in_use == 0


def test_a_long_prompt_keeps_no_verify_waiting(runner: ModelRunner) -> None:
    """Every step of the prompt answers everybody who runs, and all but a few that measure feed some of it."""
    target = Target(runner, LARGE)
    for slot in range(4):
        target.open(slot, prompt(slot), max_tokens=200)  # none ends meanwhile
    while any(len(ids) == NUM_PROMPT for ids in target.ids.values()):
        target.round()
    target.verifier.handle(open_job(9, prompt(9, 190)))
    late = target.table.get(1, 9)
    assert late is not None
    num_steps = num_feeding = 0
    while needs_prefill(late):
        num_cached, lengths = len(late.cached), [len(target.ids[slot]) for slot in range(4)]
        assert target.round()
        assert all(len(target.ids[slot]) > length for slot, length in enumerate(lengths))
        num_steps += 1
        num_feeding += len(late.cached) > num_cached
    assert num_feeding >= 3
    assert num_steps - num_feeding <= 4  # one for each size of step, and a later one


class Draft(Base):
    """A proposer, and gateways that take two of every three drafts."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        super().__init__(runner, num_blocks)
        self.proposer = Proposer(runner, self.keeper, self.engine, lambda part: None, self.metrics, MAX_PREFILL)
        self.drafted: dict[int, list[tuple[int, ...]]] = {}

    def ask(self, slot: int, ids: list[int]) -> None:
        def respond(result: Proposed | JobError) -> None:
            assert isinstance(result, Proposed), result
            self.drafted[slot].append(result.draft_ids)
            ids.extend((*result.draft_ids[:2], 5))
            if len(self.drafted[slot]) < 16:
                self.ask(slot, ids)
            else:
                self.proposer.handle(CloseJob(1, slot))

        now = time.monotonic()
        job = ProposeJob(1, slot, NUM_PROMPT, tuple(ids[NUM_PROMPT:]), 3, 1, DraftLogprobs.AUTO, 8, now, respond)
        self.proposer.handle(job)

    def run(self, temperature: float) -> dict[int, list[tuple[int, ...]]]:
        for slot in range(NUM_SLOTS):
            self.drafted[slot] = []
            self.proposer.handle(open_job(slot, prompt(slot), temperature=temperature, seed=slot))
            self.ask(slot, prompt(slot))
        for _ in range(4000):
            if not self.proposer.step(time.monotonic()) and not self.table.num_in_use:
                return self.drafted
        raise AssertionError("no end")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_short_of_memory_drafts_the_same(runner: ModelRunner, temperature: float) -> None:
    """Also when a proposal loses its memory half-way: it goes on from what it had drawn."""
    expected = Draft(runner, LARGE).run(temperature)
    small = Draft(runner, SMALL)
    assert small.run(temperature) == expected
    assert small.count("preemptions_total") > 0
    assert small.pool.num_in_use == 0
