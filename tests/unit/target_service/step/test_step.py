"""The target over a small model in this process: memory taken and given back, and prompts beside steps.

Whatever is taken from whom, the tokens are those of a pool that holds everything.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draft_service.drafters.feeding import Feeder
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.growing.grower import Grower
from draft_service.growing.pushing import Send
from outrider.drafting.ngram import Ngram
from outrider.drafting.sequence_drafter import SequenceDrafter
from outrider.engine.drafter_table import SearchDrafts, lookahead_rows_of
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.embedding_files import append_embeddings
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.followers import TableDrafter
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.target_drafter import ExtraRows, TargetDrafter
from outrider.engine.step_plan import Row
from outrider.engine.worker import scheduler
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, JobError, OpenJob, SlotKey
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, SlotTable, needs_prefill
from outrider.papers.lookahead import LookaheadDrafter
from outrider.papers.merging import merge
from outrider.papers.pass_drafter import PassDrafter
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.settings.config import TargetConfig
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.draft_chooser import DraftChooser
from target_service.drafting.own_drafts import OwnDrafts
from target_service.drafting.proposal import Proposal
from target_service.features.features import Features, FeatureSubscription
from target_service.leases.hold import MAX_HOLD_S
from target_service.leases.lease_jobs import Fallback, Verdict, VerifyJob
from target_service.leases.leases import Leases
from target_service.step.step import Step
from target_service.step.verifier import Verifier
from tests.random_heads import random_lookahead
from tests.tiny_models import tiny_llama

BLOCK_SIZE = 16
NUM_PROMPT, NUM_TOKENS, NUM_SLOTS = 40, 60, 8
BLOCKS_FOR_ONE = 7
SMALL, LARGE = 2 * BLOCKS_FOR_ONE + 3, NUM_SLOTS * BLOCKS_FOR_ONE
MAX_PREFILL = 64
WINDOW = "3,4,2"
"""W, N and G of lookahead decoding."""
NUM_AHEAD = 3
"""Look-ahead embeddings."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0)


@pytest.fixture(scope="module")
def embeddings(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_lookahead(folder, tmp_path_factory.mktemp("pass"), NUM_AHEAD)


def load(folder: str, num_blocks: int = LARGE, **options: Any) -> ModelRunner:
    """Load a model as a worker does, for tests that put a pool of their own into it."""
    sizes = {"kv_cache_tokens": num_blocks * BLOCK_SIZE, "max_slots": NUM_SLOTS, "context_limit": None}
    rest = {"attention_path": "auto", "batch_invariant": True, **options}
    return load_runner(TargetConfig(model=folder, device="cpu", dtype="float32", **sizes, **rest))


@pytest.fixture(scope="module")
def runner(folder: str, embeddings: str) -> ModelRunner:
    return load(folder, lookahead_embeddings=embeddings)


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

    def make_grower(self, runner: ModelRunner, send: Send, table: SequenceDrafter | None = None) -> Grower:
        rest = (runner, self.keeper, self.metrics, MAX_PREFILL)
        return Grower(
            lambda growing: ModelDrafter(Feeder(*rest, growing)),
            self.keeper,
            self.engine,
            send,
            self.metrics,
            lambda address, epoch, request: None,
            open_ahead=None if table is None else lookahead_rows_of(table),
        )

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

    return OpenJob(1, slot, tuple(ids), len(ids), params, respond, target_address="nowhere:1", target_epoch=1)


class Target(Base):
    """A verifier, and gateways that let every slot run on, with drafts under every other of its steps."""

    speculation = Speculation(max_draft_tokens=3)
    drafter: Drafter | None = None
    is_drafted = False
    max_parked_bytes = 1 << 20

    def __init__(self, runner: ModelRunner, num_blocks: int, **options: Any) -> None:
        super().__init__(runner, num_blocks, **options)
        self.leases = Leases(self.max_parked_bytes, self.metrics, self.engine.answer)
        self.drafters: dict[Drafter, TargetDrafter] = {
            Drafter.NGRAM: TableDrafter(Ngram(), runner.facts.vocab_size),
            Drafter.LOOKAHEAD: LookaheadDrafter(WINDOW, runner.facts.context_limit),
            Drafter.PASS: PassDrafter(runner.facts.vocab_size, NUM_AHEAD),
        }
        self.own = OwnDrafts(self.drafters)
        self.features = Features(runner, self.leases)
        shared = (runner, self.keeper, self.leases, self.engine)
        rest = (MAX_PREFILL, self.own, self.features)
        self.stepping = Step(*shared, self.metrics, *rest, merge)
        self.verifier = Verifier(self.stepping, *shared, *rest, SearchDrafts)
        self.ids: dict[int, list[int]] = {}

    def open(self, slot: int, ids: list[int], **options: Any) -> None:
        self.ids[slot] = list(ids)
        job = replace(open_job(slot, ids, **options), drafter=self.drafter, speculation=self.speculation)
        self.verifier.handle(job)
        self.lease(slot, lambda result: self.heard(slot, result))

    def lease(self, slot: int, respond: Callable[[Any], None]) -> None:
        now = time.monotonic()
        self.verifier.handle(
            VerifyJob(1, slot, 0, tuple(self.ids[slot]), [(slot, self.is_drafted)], 10**6, now, respond)
        )

    def heard(self, slot: int, result: Verdict | JobError) -> None:
        assert isinstance(result, Verdict), result
        ids = self.ids[slot]
        ids.extend(result.token_ids)
        if result.finish is not None:
            self.verifier.handle(CloseJob(1, slot))
        elif len(ids) % 2 and self.drafter is None:  # the last token again is right sometimes
            self.deliver(slot, len(ids), [ids[-1]] * 3)

    def deliver(self, slot: int, root_len: int, ids: list[int], parents: list[int] | None = None) -> None:
        """Guesses: a chain, or a tree with these parents."""
        num = len(ids)
        parents = list(range(ROOT, num - 1)) if parents is None else parents
        ranks, kinds = (
            [parents[:node].count(parent) for node, parent in enumerate(parents)],
            [NodeKind.DETERMINISTIC] * num,
        )
        nodes = Delivery(slot, root_len, ids, parents, ranks, kinds, None, num_bytes=4 * num)
        self.leases.hand_in(nodes)

    def step(self) -> bool:
        """Take a step. Return False when nothing is left to do."""
        return self.verifier.step(time.monotonic())

    def step_once_held_no_more(self) -> bool:
        """Take a step, for which a guess may be waited first. Return False when nothing is left to do."""
        end_s = time.monotonic() + 10.0
        while not (worked := self.step()) and self.verifier.next_wake() is not None and time.monotonic() < end_s:
            pass
        return worked

    def run(self) -> dict[int, list[int]]:
        end_s = time.monotonic() + 60.0  # a step may be held for a guess that does not come
        while time.monotonic() < end_s:
            if not self.step() and not self.table.num_in_use:
                return self.ids
        raise AssertionError(f"no end: {[(slot.key, len(slot.committed), slot.table.blocks) for slot in self.table]}")


class CrampedTarget(Target):
    """It has room for one guess of a slot, of three that come."""

    max_parked_bytes = 4


class OwnTarget(Target):
    """It drafts for itself."""

    speculation = Speculation(num_draft_tokens=3, max_draft_tokens=3)
    drafter = Drafter.NGRAM


class WindowTarget(OwnTarget):
    """It feeds windows beside what came of others."""

    drafter = Drafter.LOOKAHEAD
    speculation = Speculation(num_draft_tokens=5, max_draft_tokens=5)


class PassTarget(OwnTarget):
    """It feeds look-ahead embeddings behind its drafts."""

    drafter = Drafter.PASS


def answers(target: Target, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    for slot, ids in prompts.items():
        target.open(slot, ids)
    return target.run()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_target_short_of_memory_gives_the_same_output(runner: ModelRunner, prefix_caching: bool) -> None:
    prompts = {slot: prompt(slot) for slot in range(NUM_SLOTS)}
    expected = answers(Target(runner, LARGE), prompts)
    small = Target(runner, SMALL, prefix_caching=prefix_caching)
    assert answers(small, prompts) == expected
    assert small.count("preemptions_total") > 0
    assert small.count("slots_waiting") == 0
    assert small.pool.num_in_use == 0 and len(small.leases) == 0
    assert (small.pool.num_cached > 0) is prefix_caching


@pytest.mark.parametrize("make", [OwnTarget, WindowTarget, PassTarget])
def test_followers_outlive_their_slots_memory_and_not_their_slots(runner: ModelRunner, make: type[Target]) -> None:
    prompts = {slot: prompt(slot) for slot in range(NUM_SLOTS)}
    expected = answers(Target(runner, LARGE), prompts)
    small = make(runner, SMALL)
    assert answers(small, prompts) == expected
    assert small.count("preemptions_total") > 0 and small.metrics_of("verify") > 0
    assert len(small.own._slots) == 0 and small.pool.num_in_use == 0


@pytest.mark.parametrize("make", [WindowTarget, PassTarget])
def test_a_drafter_reads_the_target_s_logits_after_each_of_its_tokens(
    make: type[Target], runner: ModelRunner, folder: str, embeddings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is drafted beside them, in chains and trees, and fed for other slots; and none of them stays."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert append_embeddings(network, embeddings) == NUM_AHEAD
    truth, target, errors, beside = UncachedModel(network), make(runner, LARGE), list[float](), set[int]()
    assert target.drafter is not None
    drafter = target.drafters[target.drafter]
    read = drafter.read

    def compared(slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        drafted, paths = verified[slot.key], list[list[int]]()
        beside.add(len(drafted))
        parents = [*drafted.parents, *rows.parents]
        for token_id, parent in zip([*drafted.ids, *rows.ids], parents, strict=True):
            paths.append([*(slot.committed if parent < 0 else paths[parent]), token_id])
        expected = torch.stack([truth.forward(ids)[-1] for ids in paths[len(drafted) :]])
        errors.append(float((logits - expected).abs().max() / expected.abs().max()))
        read(slot, logits, path, rows)

    verified = dict[SlotKey, DraftTree]()
    make = DraftChooser.proposal

    def made(drafting: DraftChooser, *chosen: Any) -> Proposal:
        found: Any = make(drafting, *chosen)
        verified[found.slot.key] = found.tree
        return found

    monkeypatch.setattr(drafter, "read", compared)
    monkeypatch.setattr(DraftChooser, "proposal", made)
    for slot in range(2):
        target.open(slot, prompt(slot, 12), max_tokens=40)
    while target.table.num_in_use:
        assert target.step()
        for key, lease in [((1, each), target.leases.get((1, each))) for each in range(2)]:
            assert lease is None or lease.slot.cached == target.ids[key[1]][: len(lease.slot.cached)]
    assert len(errors) > 20 and max(errors) < 1e-4 and len(beside) > 1


def test_steps_reserve_rows_for_a_caller_as_long_as_its_prompt_is_being_fed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease came long ago then: steps that nobody bounds any more would keep the rest of its prompt waiting."""
    monkeypatch.setattr("target_service.leases.lease.DORMANT_S", 0.0)
    target, fed = Target(runner, LARGE), list[int]()
    target.open(0, prompt(0), max_tokens=30)
    while not target.ids[0][NUM_PROMPT:]:
        target.step()
    target.ids[1] = prompt(1, 150)
    target.verifier.handle(replace(open_job(1, target.ids[1]), scheduling=Scheduling(b"other")))
    target.lease(1, lambda result: target.heard(1, result))
    slot, choose = target.table.get(1, 1), target.stepping._budget.choose
    assert slot is not None

    def chosen(demands: Any, max_rows: int, num_free: int, absent: list[Scheduling]) -> Any:
        if slot.cached and needs_prefill(slot):
            fed.append(len(slot.cached))
            assert Scheduling(b"other") in absent
        return choose(demands, max_rows, num_free, absent)

    monkeypatch.setattr(target.stepping._budget, "choose", chosen)
    target.run()
    assert len(set(fed)) > 1, "it was fed in several steps"


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
    assert isinstance(failed[0], JobError) and len(target.own._slots) == 1 and len(target.leases) == 0
    monkeypatch.setattr(runner, "forward", forward)
    target.lease(0, lambda result: target.heard(0, result))
    assert target.run()[0] == expected and len(target.own._slots) == 0


def test_prompts_that_begin_alike_share_memory_and_give_the_same_output(runner: ModelRunner) -> None:
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
        assert target.step_once_held_no_more()
        assert all(len(target.ids[slot]) > length for slot, length in enumerate(lengths))
        num_steps += 1
        num_feeding += len(late.cached) > num_cached
    assert num_feeding >= 3
    assert num_steps - num_feeding <= 4  # one for each size of step, and a later one


class Fixed(Target):
    """Its requests name how much is verified, and a draft is told of them that sends nothing by itself."""

    speculation = Speculation(num_draft_tokens=2, max_draft_tokens=2)
    is_drafted = True

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, LARGE)
        self.verdicts: list[Verdict] = []
        self.open(0, prompt(0))
        lease = self.leases.get((1, 0))
        assert lease is not None
        self.slot_lease = lease
        while needs_prefill(self.slot_lease.slot):
            self.step()

    def heard(self, slot: int, result: Verdict | JobError) -> None:
        if isinstance(result, Verdict):
            self.ids[slot].extend(result.token_ids)
            self.verdicts.append(result)

    def step_after(self, seconds: float) -> bool:
        """Take a step so long after the slot could go on."""
        return self.verifier.step(self.slot_lease.ready_s + seconds)


def test_what_is_named_is_waited_for_and_again_once_something_has_come_late(runner: ModelRunner) -> None:
    target = Fixed(runner)
    assert not target.step_after(0.5 * MAX_HOLD_S) and not target.verdicts
    assert target.verifier.next_wake() == target.slot_lease.ready_s + MAX_HOLD_S
    assert target.step_after(MAX_HOLD_S) and target.verdicts[-1].fallback is Fallback.LATE
    assert target.step_after(0.0), "what was waited for in vain is not waited for again"
    target.deliver(0, NUM_PROMPT, target.ids[0][NUM_PROMPT:])  # both are committed by now
    assert not target.step_after(0.5 * MAX_HOLD_S)
    target.deliver(0, len(target.ids[0]), [1, 1])
    assert target.step_after(0.5 * MAX_HOLD_S)
    verdict = target.verdicts[-1]
    assert (verdict.num_drafted, verdict.outcomes[0].num_wasted, verdict.fallback, len(target.verdicts)) == (
        2,
        2,
        None,
        3,
    )


class Reading:
    """A draft that reads rows of features, at its end of the link."""

    has_capacity = True

    def send_features(self, subscription: FeatureSubscription, start: int, num_tokens: int, data: bytes) -> None: ...

    def count(self, fate: str, num_tokens: int, num_bytes: int) -> None: ...


def test_a_step_is_not_held_for_a_draft_that_reads_rows_of_what_is_fed_in_it(runner: ModelRunner) -> None:
    """It cannot have drafted: both would wait, the target for as long as it may."""
    target = Fixed(runner)
    for _ in range(3):
        assert target.step_after(MAX_HOLD_S)
        target.slot_lease.first.is_active = True  # something is on its way
    assert not target.step_after(0.0)
    target.features.subscribe(FeatureSubscription(Reading(), b"a head", ticket=0, next_position=0))
    assert not target.step_after(0.0), "the rows of all but the last token were made by earlier steps"
    target.slot_lease.slot.truncate(len(target.slot_lease.slot.committed) - 1)
    assert target.step_after(0.0), "the token before the last has no row yet"
    assert not target.step_after(0.0), "now it has"


def test_what_comes_while_a_step_runs_lies_ready_for_the_next(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, target, forward = Fixed(runner), Fixed(runner), runner.forward
    assert before.step_after(MAX_HOLD_S)
    said = before.ids[0][NUM_PROMPT]
    runner.set_pool(target.pool)

    def meanwhile(rows: Any) -> Any:
        target.deliver(0, NUM_PROMPT, [said, 1, 1])
        return forward(rows)

    monkeypatch.setattr(runner, "forward", meanwhile)
    assert target.step_after(MAX_HOLD_S) and target.ids[0][NUM_PROMPT] == said
    monkeypatch.setattr(runner, "forward", forward)
    assert target.slot_lease.first.has_drafts and target.step_after(0.0)
    assert (target.verdicts[-1].num_drafted, target.verdicts[-1].outcomes[0].has_drafts) == (2, True)


class FixedTree(Fixed):
    speculation = Speculation(max_draft_tokens=4, tree=TreeShape.parse("2x1"))


@pytest.mark.parametrize(("make", "parents", "depth"), [(Fixed, None, 2), (FixedTree, [ROOT, ROOT, 0, 1], 2)])
def test_a_verdict_has_the_number_of_draft_tokens_that_might_have_been_accepted(
    runner: ModelRunner, make: type[Fixed], parents: list[int] | None, depth: int
) -> None:
    target, ids = make(runner), [3, 4] if parents is None else [3, 4, 5, 6]
    target.deliver(0, NUM_PROMPT, ids, parents)
    assert target.step_after(0.0)
    assert (target.verdicts[0].num_drafted, target.verdicts[0].depth) == (len(ids), depth)


def test_draft_tokens_over_the_limit_are_logged_once(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    prompts = {0: prompt(0)}
    expected = answers(Target(runner, LARGE), prompts)
    assert answers(CrampedTarget(runner, LARGE), prompts) == expected
    told = [record.getMessage() for record in caplog.records if "drafts are dropped" in record.getMessage()]
    assert told == [
        "drafts are dropped: 1 answers share 4 bytes, and a draft token brings 4; let laws be cut (draft_logprobs "
        "topk:128), or free memory of the host before the target starts"
    ]


def test_scores_of_prompts_take_no_more_logits_than_memory_is_kept_for(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "VERIFY_TOKENS", 1)
    target, forward, num_rows, num_told = Target(runner, LARGE), runner.forward, list[int](), list[int]()

    def counted(rows: Sequence[Row]) -> Tensor:
        num_rows.append(sum(row.num_logits for row in rows))
        return forward(rows)

    def respond(result: Any) -> None:
        num_told.append(len(result.prompt_logprobs))
        target.heard(0, result)

    monkeypatch.setattr(runner, "forward", counted)
    target.ids[0] = prompt(0, 40)
    target.verifier.handle(replace(open_job(0, target.ids[0], max_tokens=2), num_prompt_logprobs=1))
    target.lease(0, respond)
    target.run()
    assert sum(num_told) == 39 and max(num_rows) == NUM_SLOTS
