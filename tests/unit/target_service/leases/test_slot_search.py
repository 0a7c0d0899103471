"""Beam search in a target's slots, drafted for or not: the answers are those of transformers' own, on every path."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_service.slot_jobs import AdvanceJob
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.beam import BeamLevel, Hypothesis
from outrider.engine.speculation.candidates import BudgetItem
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import MAX_NARROW, CloseJob, JobError, JobFault, OpenJob
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.params import BeamParams, SamplingParams
from outrider.wire.requests.speculation import NumDraftTokens, Speculation
from outrider.wire.settings.config import TargetConfig
from target_service.leases.lease_jobs import Verdict, VerifyJob
from target_service.leases.slot_search import Beams
from tests.tiny_models import perturbed_copy, tiny_llama
from tests.unit.target_service.step.test_step import (
    BLOCK_SIZE,
    LARGE,
    NUM_PROMPT,
    NUM_SLOTS,
    SMALL,
    Base,
    Target,
    prompt,
)

STOP_IDS = tuple(range(40))
"""So many that answers of this model end by themselves, too."""
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0)


@lru_cache
def load(folder: str, path: str) -> ModelRunner:
    sizes = {"kv_cache_tokens": LARGE * BLOCK_SIZE, "max_slots": NUM_SLOTS, "context_limit": None}
    rest = {"attention_path": path, "batch_invariant": False}
    return load_runner(TargetConfig(model=folder, device="cpu", dtype="float32", **sizes, **rest))


@pytest.fixture
def runner(folder: str) -> ModelRunner:
    return load(folder, "auto")


@lru_cache
def model_of(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@lru_cache
def by_transformers(folder: str, ids: tuple[int, ...], beams: BeamParams, max_tokens: int) -> list[tuple[int, ...]]:
    found = model_of(folder).generate(
        torch.tensor([ids]),
        num_beams=beams.width,
        num_return_sequences=beams.width,
        length_penalty=beams.length_penalty,
        early_stopping={"FALSE": False, "TRUE": True}.get(beams.early_stopping.name, "never"),
        max_new_tokens=max_tokens,
        eos_token_id=list(STOP_IDS),
        pad_token_id=0,
        do_sample=False,
    )
    return [cut(row[len(ids) :]) for row in found.tolist()]


def cut(ids: Sequence[int]) -> tuple[int, ...]:
    """Up to the first stop id."""
    for place, token_id in enumerate(ids):
        if token_id in STOP_IDS:
            return tuple(ids[: place + 1])
    return tuple(ids)


def params(beams: BeamParams, max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, beams=beams, stop_token_ids=STOP_IDS[1:], ignore_eos=False
    )


class Searching(Target):
    """A verifier and a gateway that knows the levels of each search."""

    def __init__(self, runner: ModelRunner, num_blocks: int = LARGE, speculation: Speculation | None = None) -> None:
        super().__init__(runner, num_blocks)
        self.speculation = speculation or Speculation()
        self.levels: dict[int, list[BeamLevel]] = {}
        self.steps: dict[int, list[Verdict]] = {}
        self.found: dict[int, list[Hypothesis]] = {}
        self.ticket = 0

    def search(self, slot: int, ids: list[int], params: SamplingParams) -> None:
        self.ids[slot], self.levels[slot], self.steps[slot] = list(ids), [], []
        self.verifier.handle(self.open_job(slot, ids, params))
        self.begin(slot)

    def open_job(self, slot: int, ids: list[int], params: SamplingParams) -> OpenJob:
        return OpenJob(1, slot, tuple(ids), len(ids), params, self.opened, speculation=self.speculation)

    def opened(self, result: object) -> None:
        assert not isinstance(result, JobError), result

    def begin(self, slot: int) -> None:
        """Start a lease, under another ticket, from the levels that are known here."""
        self.ticket, ids, levels = self.ticket + 1, self.ids[slot], tuple(self.levels[slot])
        ticket, now = self.ticket, time.monotonic()
        job = VerifyJob(
            1, slot, len(ids), (), [(ticket, False)], 10**6, now, lambda r: self.told(slot, ticket, r), levels
        )
        self.verifier.handle(job)

    def told(self, slot: int, ticket: int, result: Verdict | JobError) -> None:
        if isinstance(result, JobError):
            assert result.fault is JobFault.CANCELLED, result
            return
        assert result.committed_len == len(self.ids[slot]) + len(self.levels[slot]) and not result.token_ids
        assert len(result.kinds) == len(result.levels) == result.num_accepted + 1
        self.levels[slot] += result.levels
        self.steps[slot].append(result)
        if result.finish is not None:
            self.found[slot] = list(result.hypotheses)
            self.verifier.handle(CloseJob(1, slot))
        else:
            self.decided(slot, ticket)

    def decided(self, slot: int, ticket: int) -> None:
        """May deliver drafts."""

    def finish(self) -> dict[int, list[tuple[int, ...]]]:
        end_s = time.monotonic() + 60.0
        while self.table.num_in_use:
            self.step()
            assert time.monotonic() < end_s, "no end"
        assert self.pool.num_in_use == 0 and len(self.leases) == 0
        return {slot: [each.ids for each in found] for slot, found in self.found.items()}


class Foretold(Searching):
    """Drafts come of a search that was made before, some of them wrong, late or lost."""

    def __init__(self, *args: Any, dice: random.Random, wrong: float, depth: int = 4, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.known: dict[int, list[BeamLevel]] = {}
        self.dice, self.wrong, self.depth = dice, wrong, depth

    def decided(self, slot: int, ticket: int) -> None:
        start, ids, parents, ranks = len(self.levels[slot]), list[int](), list[int](), list[int]()
        if self.dice.random() < self.wrong / 4:
            return
        above: dict[int, int] = {beam: ROOT - beam for beam in range(len(self.levels[slot][-1].active))}
        for level in self.known[slot][start : start + self.depth]:
            here = dict[int, int]()
            for rank, (parent, token_id, _) in enumerate(level.active):
                here[rank] = len(ids)
                parents.append(above[parent])
                ids.append(self.dice.randrange(40, 300) if self.dice.random() < self.wrong else token_id)
                ranks.append(rank)
            above = here
        root_len = len(self.ids[slot]) + start - (self.dice.random() < self.wrong / 4)
        if ids and root_len >= len(self.ids[slot]):
            kinds = [NodeKind.DETERMINISTIC] * len(ids)
            self.leases.hand_in(Delivery(ticket, root_len, ids, parents, ranks, kinds, None, num_bytes=4 * len(ids)))


SEARCHES = [
    (BeamParams(2), 0),
    (BeamParams(4, 0.0, EarlyStopping.NEVER), 1),
    (BeamParams(4, 1.0, EarlyStopping.TRUE), 2),
    (BeamParams(8, 2.0), 3),
    (BeamParams(3, -1.0), 4),
]


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
def test_answers_are_transformers_own_on_every_path(folder: str, path: str) -> None:
    target = Searching(load(folder, path))
    for beams, slot in SEARCHES:
        target.search(slot, prompt(slot), params(beams))
    found = target.finish()
    expected = {slot: by_transformers(folder, tuple(prompt(slot)), beams, MAX_TOKENS) for beams, slot in SEARCHES}
    assert found == expected
    lengths = [len(ids) for answers in expected.values() for ids in answers]
    assert min(lengths) < MAX_TOKENS and max(lengths) > 8, "the searches exercise nothing"


def test_a_prompt_of_one_token_and_an_answer_of_one(folder: str, runner: ModelRunner) -> None:
    target = Searching(runner)
    target.search(0, [70], params(BeamParams(4), 8))
    target.search(1, prompt(1), params(BeamParams(5), 1))
    found = target.finish()
    assert found[0] == by_transformers(folder, (70,), BeamParams(4), 8)
    assert found[1] == by_transformers(folder, tuple(prompt(1)), BeamParams(5), 1)


def plain_levels(runner: ModelRunner) -> dict[int, list[BeamLevel]]:
    target = Searching(runner)
    for beams, slot in SEARCHES:
        target.search(slot, prompt(slot), params(beams))
    target.finish()
    return target.levels


@pytest.mark.parametrize("wrong", [0.0, 0.2, *(pytest.param(wrong, marks=pytest.mark.slow) for wrong in (0.02, 1.0))])
@pytest.mark.parametrize("fixed", ["auto", 3])
def test_drafts_change_no_answer_and_right_ones_save_steps(
    folder: str, runner: ModelRunner, wrong: float, fixed: NumDraftTokens
) -> None:
    levels = plain_levels(runner)
    drafts = Speculation(num_draft_tokens=fixed, max_draft_tokens=32)
    target = Foretold(runner, speculation=drafts, dice=random.Random(7), wrong=wrong)
    target.known = levels
    for beams, slot in SEARCHES:
        target.search(slot, prompt(slot), params(beams))
    found = target.finish()
    assert found == {slot: by_transformers(folder, tuple(prompt(slot)), beams, MAX_TOKENS) for beams, slot in SEARCHES}
    assert {slot: [each.active for each in own] for slot, own in target.levels.items()} == {
        slot: [each.active for each in own] for slot, own in levels.items()
    }
    num_steps = sum(map(len, target.steps.values()))
    num_levels = sum(map(len, levels.values()))
    if fixed != "auto":
        assert num_steps < 0.45 * num_levels if not wrong else num_steps <= num_levels
        assert any(each.num_drafted for each in target.steps[3])


class Robbed(Foretold):
    """Memory of its slots is taken for others, as the scheduler does it."""

    def step(self) -> bool:
        for slot in self.table:
            if self.dice.random() < 0.2:
                slot.free_cache()
        return super().step()


@pytest.mark.parametrize(("max_draft_tokens", "prefix_caching"), [(0, True), (16, True), (16, False)])
def test_what_was_lost_is_fed_again_in_pieces(
    folder: str, runner: ModelRunner, max_draft_tokens: int, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prompt is: no step feeds more of one search, its drafts apart."""
    most, known = MAX_NARROW, plain_levels(runner)  # so many ride along in any step
    monkeypatch.setattr("tests.unit.target_service.step.test_step.MAX_PREFILL", most)
    target = Robbed(runner, speculation=Speculation(2, max_draft_tokens), dice=random.Random(1), wrong=0.1)
    target.pool.prefix.enabled = prefix_caching
    target.known = known
    forward, rows = runner.forward, list[Row]()

    def noted(step: Sequence[Row]) -> Tensor:
        rows.extend(step)
        return forward(step)

    monkeypatch.setattr(runner, "forward", noted)
    offers, withheld = Beams.budget_items, list[tuple[int, int]]()

    def offered(search: Beams, slot: Slot, shares: SlotAcceptance) -> list[BudgetItem]:
        found = offers(search, slot, shares)
        if not search._next_nodes(slot)[1]:
            withheld.append((len(found), len(search.drafts.budget_items(shares, 99))))
        return found

    monkeypatch.setattr(Beams, "budget_items", offered)
    for beams, slot in SEARCHES:
        target.search(slot, prompt(slot), params(beams))
    expected = {slot: by_transformers(folder, tuple(prompt(slot)), beams, MAX_TOKENS) for beams, slot in SEARCHES}
    assert target.finish() == expected
    assert withheld and not any(num for num, _ in withheld), "no draft tokens are asked for with a piece"
    assert any(num_here for _, num_here in withheld) == (max_draft_tokens > 0)
    pieces = [row for row in rows if row.parents is not None and not row.num_logits]
    assert len(pieces) > 10 and max(row.num_new for row in pieces) == most
    assert max(row.num_new for row in rows) <= most + max_draft_tokens


def test_a_search_goes_on_from_its_levels_on_another_lease_and_on_another_target(
    folder: str, runner: ModelRunner
) -> None:
    target, beams = Searching(runner), BeamParams(4)
    target.search(0, prompt(0), params(beams))
    for _ in range(9):
        target.step()
    target.begin(0)
    for _ in range(4):
        target.step()
    other = Searching(runner)
    other.ids, other.levels, other.steps = {0: prompt(0)}, {0: target.levels[0]}, {0: []}
    assert len(other.levels[0]) >= 8
    other.verifier.handle(other.open_job(0, prompt(0), params(beams)))
    other.begin(0)
    assert other.finish()[0] == by_transformers(folder, tuple(prompt(0)), beams, MAX_TOKENS)
    assert len(other.steps[0]) + 8 <= MAX_TOKENS


def test_what_no_search_can_begin_with_is_refused(runner: ModelRunner) -> None:
    target, refused = Searching(runner), list[Any]()
    job = target.open_job(0, prompt(0), params(BeamParams(64), 60))
    target.verifier.handle(replace(job, respond=refused.append))
    assert refused[0].fault is JobFault.INVALID and "n of a beam search" in refused[0].message
    target.search(1, prompt(1), params(BeamParams(2), 2))
    target.finish()
    target.verifier.handle(target.open_job(1, prompt(1), params(BeamParams(2), 2)))
    levels = tuple(target.levels[1])
    target.verifier.handle(VerifyJob(1, 1, NUM_PROMPT, (), [(9, False)], 10**6, 0.0, refused.append, levels))
    assert refused[1].fault is JobFault.INVALID


class Draft(Base):
    """A grower beside a target, whose gateway is this test."""

    def __init__(self, runner: ModelRunner, target: Searching, speculation: Speculation, num_blocks: int) -> None:
        super().__init__(runner, num_blocks)
        self.target, self.speculation = target, speculation
        self.grower = self.make_grower(runner, self.sent)
        self.told_len: dict[int, int] = {}
        self.num_sent = 0
        self.dice = random.Random(5)
        self.loses = 0.0

    def sent(self, address: str, epoch: int, nodes: Delivery) -> None:
        self.num_sent += len(nodes.ids)
        if self.dice.random() >= self.loses:
            self.target.leases.hand_in(replace(nodes, num_bytes=4 * len(nodes.ids)))

    def open(self, slot: int, ids: list[int], params: SamplingParams) -> None:
        job = OpenJob(1, slot, tuple(ids), len(ids), params, self.answered, target_address="t:1", target_epoch=1)
        self.grower.handle(replace(job, speculation=self.speculation))
        self.told_len[slot] = 0

    def answered(self, result: object) -> None:
        assert not isinstance(result, JobError), result

    def advance(
        self, slot: int, ids: list[int], levels: list[BeamLevel], ticket: int, *, is_missed: bool = False
    ) -> None:
        known = self.told_len[slot]
        job = AdvanceJob(1, slot, ticket, len(ids) + known, (), is_missed, tuple(levels[known:]))
        self.grower.handle(job)
        self.told_len[slot] = len(levels)
        for _ in range(200):
            if not self.grower.step(time.monotonic()):
                return


class Pair(Searching):
    """A draft is told of every verdict, and has time for so many steps then."""

    draft: Draft
    dies_after = 10**9

    def begin(self, slot: int) -> None:
        super().begin(slot)
        self.decided(slot, self.ticket)

    def decided(self, slot: int, ticket: int) -> None:
        if len(self.steps[slot]) >= self.dies_after:
            return
        is_missed = not self.steps[slot] or not self.steps[slot][-1].outcomes[0].has_drafts
        self.draft.advance(slot, self.ids[slot], self.levels[slot], ticket, is_missed=is_missed)


@pytest.fixture(scope="module")
def draft_folder(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return perturbed_copy(folder, Path(tmp_path_factory.mktemp("draft")), noise=0.02)


@pytest.mark.parametrize(
    ("speculation", "num_blocks", "loses", "dies_after"),
    [
        (Speculation(num_draft_tokens=3, max_draft_tokens=32), LARGE, 0.0, 10**9),
        (Speculation(max_draft_tokens=32), LARGE, 0.0, 10**9),
        (Speculation(num_draft_tokens=2, max_draft_tokens=32), SMALL, 0.2, 10**9),
        (Speculation(num_draft_tokens=3, max_draft_tokens=32), LARGE, 0.0, 4),
        (Speculation(num_draft_tokens=3, max_draft_tokens=32, is_sequential=True), LARGE, 0.0, 10**9),
    ],
    ids=["fixed", "auto", "short of memory and lossy", "dies", "sequential"],
)
def test_a_drafts_beams_change_no_answer_and_save_steps(
    folder: str,
    draft_folder: str,
    speculation: Speculation,
    num_blocks: int,
    loses: float,
    dies_after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("target_service.leases.hold.MAX_HOLD_S", 0.01)
    target = Pair(load(folder, "auto"), speculation=speculation)
    target.draft = draft = Draft(load(draft_folder, "auto"), target, speculation, num_blocks)
    draft.loses, target.dies_after = loses, dies_after
    for beams, slot in SEARCHES:
        draft.open(slot, prompt(slot), params(beams))
        target.search(slot, prompt(slot), params(beams))
    found = target.finish()
    assert found == {slot: by_transformers(folder, tuple(prompt(slot)), beams, MAX_TOKENS) for beams, slot in SEARCHES}
    num_steps, num_levels = (sum(map(len, each.values())) for each in (target.steps, target.levels))
    assert draft.num_sent > 0
    if speculation.is_fixed and not loses and dies_after > 100:
        assert num_steps < 0.7 * num_levels


def test_a_part_of_a_level_that_cannot_hold_all_live_beams_is_not_fed(runner: ModelRunner) -> None:
    target = Searching(runner, speculation=Speculation(2, 32))
    target.search(0, prompt(0), params(BeamParams(4)))
    while not target.levels[0]:
        target.step()
    lease = target.leases.get((1, 0))
    assert lease is not None and lease.beams is not None
    parents = [*(ROOT - beam for beam in range(4)), ROOT, 0, 1, 2, 3, 3]
    ids, ranks, kinds = list(range(50, 60)), [*range(5), *range(5)], [NodeKind.DETERMINISTIC] * 10
    length = NUM_PROMPT + len(target.levels[0])
    target.leases.hand_in(Delivery(target.ticket, length, ids, parents, ranks, kinds, None))
    target.leases.insert_deliveries()
    assert len(lease.beams.budget_items(lease.slot, lease.first.acceptance)) == 10
    fed = [len(lease.beams.feed(lease.slot, count).draft_nodes) for count in (0, 3, 4, 5, 8, 9, 10)]
    assert fed == [0, 0, 4, 5, 5, 9, 10]
