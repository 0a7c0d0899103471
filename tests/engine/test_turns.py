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

from draft_service.grower import Grower
from draft_service.jobs import AdvanceJob
from outrider.drafting.ngram import Ngram
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.nodes import PATH_END, NodeKind, Nodes
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, JobError, OpenJob
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import SlotTable, needs_prefill
from outrider.wire.kinds import Drafter
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import TargetConfig
from outrider.wire.speculation import Speculation
from target_service.jobs import Verdict, VerifyJob
from target_service.leases import Leases
from target_service.own_drafts import OwnDrafts
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
    """A verifier, and gateways that let every slot run on, with drafts under every other of its steps."""

    speculation = Speculation(max_draft_tokens=3)
    drafter: Drafter | None = None

    def __init__(self, runner: ModelRunner, num_blocks: int, **options: Any) -> None:
        super().__init__(runner, num_blocks, **options)
        self.leases = Leases(1 << 20, self.metrics, self.engine.answer)
        self.own = OwnDrafts({Drafter.NGRAM: Ngram()}, runner.facts.vocab_size)
        rest = (MAX_PREFILL, self.own)
        self.verifier = Verifier(runner, self.keeper, self.leases, self.engine, self.metrics, *rest)
        self.ids: dict[int, list[int]] = {}

    def open(self, slot: int, ids: list[int], **options: Any) -> None:
        self.ids[slot] = list(ids)
        job = replace(open_job(slot, ids, **options), drafter=self.drafter, speculation=self.speculation)
        self.verifier.handle(job)
        self.lease(slot, lambda result: self.heard(slot, result))

    def lease(self, slot: int, respond: Callable[[Any], None]) -> None:
        now = time.monotonic()
        self.verifier.handle(VerifyJob(1, slot, 0, tuple(self.ids[slot]), slot, 10**6, False, now, respond))

    def heard(self, slot: int, result: Verdict | JobError) -> None:
        assert isinstance(result, Verdict), result
        ids = self.ids[slot]
        ids.extend(result.token_ids)
        if result.finish is not None:
            self.verifier.handle(CloseJob(1, slot))
        elif len(ids) % 2 and self.drafter is None:  # the last token again is right sometimes
            parents, kinds = [PATH_END, 0, 1], [NodeKind.GUESS] * 3
            nodes = Nodes(slot, len(ids), (), [ids[-1]] * 3, parents, [0] * 3, kinds, [0] * 3, None, num_bytes=12)
            self.verifier.deliver(nodes)

    def step(self) -> bool:
        """Take a step. Return False when nothing is left to do."""
        return self.verifier.step(time.monotonic())

    def run(self) -> dict[int, list[int]]:
        end_s = time.monotonic() + 60.0  # a step may be held for a guess that does not come
        while time.monotonic() < end_s:
            if not self.step() and not self.table.num_in_use:
                return self.ids
        raise AssertionError(f"no end: {[(slot.key, len(slot.committed), slot.table.blocks) for slot in self.table]}")


class OwnTarget(Target):
    """It drafts for itself."""

    speculation = Speculation(num_draft_tokens=3, max_draft_tokens=3)
    drafter = Drafter.NGRAM


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
    assert small.pool.num_in_use == 0 and len(small.leases) == 0
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
    target.heard = lambda slot, result: isinstance(result, JobError) or Target.heard(target, slot, result)  # type: ignore
    target.open(0, prompt(0))
    for _ in range(6):
        target.step()
    forward = runner.forward

    def fails(rows: Any) -> Any:
        raise RuntimeError("out of memory")

    failed: list[object] = []
    target.lease(0, failed.append)
    monkeypatch.setattr(runner, "forward", fails)
    with pytest.raises(RuntimeError):
        target.step()
    target.verifier.fail_step(RuntimeError("out of memory"))
    assert isinstance(failed[0], JobError) and len(target.own) == 1 and len(target.leases) == 0
    monkeypatch.setattr(runner, "forward", forward)
    target.lease(0, lambda result: target.heard(0, result))
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
        target.step()
    target.verifier.handle(open_job(9, prompt(9, 190)))
    late = target.table.get(1, 9)
    assert late is not None
    num_steps = num_feeding = 0
    while needs_prefill(late):
        num_cached, lengths = len(late.cached), [len(target.ids[slot]) for slot in range(4)]
        assert target.step()
        assert all(len(target.ids[slot]) > length for slot, length in enumerate(lengths))
        num_steps += 1
        num_feeding += len(late.cached) > num_cached
    assert num_feeding >= 3
    assert num_steps - num_feeding <= 4  # one for each size of step, and a later one


class Draft(Base):
    """A grower, and gateways that commit two of the drafts and another token when a tree rests."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        super().__init__(runner, num_blocks)
        rest = (self.metrics, runner.facts.vocab_size, MAX_PREFILL)
        self.grower = Grower(runner, self.keeper, self.engine, self.sent, *rest)
        self.grown: dict[int, dict[tuple[int, ...], int]] = {}

    def sent(self, address: str, epoch: int, nodes: Nodes) -> None:
        paths: list[tuple[int, ...]] = []
        for token_id, parent, kind in zip(nodes.ids, nodes.parents, nodes.kinds, strict=True):
            before = tuple(nodes.path) if parent == PATH_END else paths[parent]
            paths.append((*before, token_id))
            if kind is not NodeKind.KEY:
                self.grown[nodes.ticket].setdefault((nodes.root_len, *before), token_id)

    def run(self, temperature: float) -> dict[int, dict[tuple[int, ...], int]]:
        """Return what was proposed first after each path, by the committed length that it hangs under."""
        ids = {slot: prompt(slot) for slot in range(NUM_SLOTS)}
        for slot in ids:
            self.grown[slot] = {}
            job = open_job(slot, ids[slot], temperature=temperature, seed=slot)
            self.grower.handle(replace(job, speculation=Speculation(3, 3)))
        for _ in range(8):
            for slot, known in ids.items():
                self.grower.handle(AdvanceJob(1, slot, slot, NUM_PROMPT, tuple(known[NUM_PROMPT:]), len(known)))
            while self.grower.step(time.monotonic()):
                pass
            for slot, known in ids.items():
                path: tuple[int, ...] = (len(known),)
                while len(path) < 3 and path in self.grown[slot]:  # who has no memory drafts nothing
                    path = (*path, self.grown[slot][path])
                known.extend((*path[1:], 5))
        for slot in ids:
            self.grower.handle(CloseJob(1, slot))
        return self.grown


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_short_of_memory_drafts_the_same(runner: ModelRunner, temperature: float) -> None:
    """Also when a tree loses its memory half-way: it is grown again as it was."""
    expected = Draft(runner, LARGE).run(temperature)
    small = Draft(runner, SMALL)
    found = small.run(temperature)
    assert small.count("preemptions_total") > 0
    assert small.pool.num_in_use == 0
    num_both = 0
    for slot, grown in found.items():
        both = grown.keys() & expected[slot].keys()
        assert {path: grown[path] for path in both} == {path: expected[slot][path] for path in both}
        num_both += len(both)
    assert num_both > 100
