"""A draft's grower over a tiny model: what it sends is what an uncached model says, however the answer went on."""

import random
import time
from dataclasses import replace

import pytest

from draft_service.slot_jobs import AdvanceJob
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import JobError, JobFault, SlotOpened, TruncateJob
from outrider.wire.requests.speculation import Speculation
from tests.tiny_models import tiny_llama
from tests.unit.target_service.step.test_step import LARGE, Base, load, open_job, prompt


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0), batch_invariant=False)


class Draft(Base):
    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, LARGE)
        self.grower = self.make_grower(runner, self.sent)
        self.paths: dict[tuple[int, ...], int] = {}
        """Of the nodes sent under all committed tokens: (root_len, ids up to it) and its rank."""
        self.errors: list[JobError] = []

    def sent(self, address: str, epoch: int, nodes: Delivery) -> None:
        found: list[tuple[int, ...]] = []
        for token_id, parent, rank, kind in zip(nodes.ids, nodes.parents, nodes.ranks, nodes.kinds, strict=True):
            before = (nodes.root_len,) if parent == ROOT else found[parent]
            found.append((*before, token_id))
            if kind is not NodeKind.REFERENCE:
                self.paths[found[-1]] = rank

    def open(self, ids: list[int]) -> None:
        def respond(result: object) -> None:
            if isinstance(result, JobError):
                self.errors.append(result)
            else:
                assert isinstance(result, SlotOpened)

        job = replace(open_job(1, ids), respond=respond, speculation=Speculation(max_draft_tokens=16))
        self.grower.handle(job)

    def advance(self, ids: list[int], base_len: int, ticket: int = 1, num_steps: int = 1000) -> None:
        self.grower.handle(AdvanceJob(1, 1, ticket, base_len, tuple(ids[base_len:])))
        while num_steps and self.grower.step(time.monotonic()):
            num_steps -= 1

    def children(self, root_len: int, path: tuple[int, ...] = ()) -> list[int]:
        under = [each for each in self.paths if each[:-1] == (root_len, *path)]
        return [each[-1] for each in sorted(under, key=self.paths.__getitem__)]


def best(runner: ModelRunner, ids: list[int], num: int) -> list[int]:
    """By a model that was fed all at once in a pool of nobody else."""
    table = runner.pool.new_table()
    try:
        found: list[int] = runner.forward([Row.of(table, ids, 0, 1)])[0].topk(num).indices.tolist()
        return found
    finally:
        table.free()


def check(runner: ModelRunner, draft: Draft, ids: list[int]) -> None:
    """The first guesses after the root, and after its first child, are the model's."""
    first = draft.children(len(ids))
    assert first and first == best(runner, ids, len(first))
    second = draft.children(len(ids), (first[0],))
    assert second and second == best(runner, [*ids, first[0]], len(second))


def test_sent_tokens_are_the_model_s_through_hits_and_misses(runner: ModelRunner) -> None:
    draft, ids, dice = Draft(runner), prompt(1), random.Random(3)
    draft.open(ids)
    draft.advance(ids, len(ids))
    check(runner, draft, ids)
    for turn in range(12):
        before = len(ids)
        for _ in range(dice.randrange(1, 4)):
            ids.append(dice.choice(best(runner, ids, 3)) if turn % 3 else dice.randrange(300))
        draft.paths.clear()
        draft.advance(ids, before)
        slot = draft.table.get(1, 1)
        assert slot is not None and slot.cached[: len(ids)] == ids
        draft.paths.clear()
        draft.advance([*ids, 9], len(ids))  # a miss or a hit: what is under it is sent again or was sent
        ids.append(9)
        if draft.children(len(ids)):
            check(runner, draft, ids)


def test_draft_tokens_are_not_mistaken_for_committed_tokens_by_their_ids(runner: ModelRunner) -> None:
    """Siblings lie side by side in the cache. A new lease commits them one after the other, as nobody fed them."""
    draft, ids = Draft(runner), prompt(2)
    draft.open(ids)
    draft.advance(ids, len(ids))
    slot = draft.table.get(1, 1)
    assert slot is not None
    guesses = slot.cached[len(ids) : len(ids) + 4]
    assert len(guesses) == 4
    draft.paths.clear()
    after = [*ids, *guesses, 9]
    draft.advance(after, len(ids), ticket=2)
    check(runner, draft, after)


def test_late_messages_change_nothing_a_gap_is_reported_and_a_stop_ends_growth(runner: ModelRunner) -> None:
    draft, ids = Draft(runner), prompt(3)
    draft.open(ids)
    draft.advance([*ids, 5, 6], len(ids))
    draft.paths.clear()
    draft.advance([*ids, 5], len(ids))
    assert not draft.paths and not draft.errors
    draft.advance([*ids, 5, 6, 7, 8, 9], len(ids) + 4)
    (error,) = draft.errors
    assert error.fault is JobFault.BEHIND and error.committed_len == len(ids) + 2
    draft.grower.handle(TruncateJob(1, 1, len(ids) + 9, "stop"))
    assert not draft.grower.step(time.monotonic()) and not draft.paths
    draft.advance([*ids, 5, 6, 7], len(ids))
    check(runner, draft, [*ids, 5, 6, 7])
