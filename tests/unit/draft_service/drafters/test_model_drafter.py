"""A draft's model whose slots do not all fit in memory, on random weights."""

import time
from dataclasses import replace

import pytest

from draft_service.slot_jobs import AdvanceJob
from outrider.drafting.ngram import Ngram
from outrider.drafting.sequence_drafter import SequenceDrafter
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.worker.jobs import CloseJob
from outrider.wire.requests.speculation import Speculation
from tests.tiny_models import tiny_llama
from tests.unit.target_service.step.test_step import LARGE, NUM_PROMPT, NUM_SLOTS, SMALL, Base, load, open_job, prompt


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0))


class Draft(Base):
    """A grower, and gateways that commit two of the drafts and another token when a tree rests."""

    def __init__(self, runner: ModelRunner, num_blocks: int, table: SequenceDrafter | None = None) -> None:
        super().__init__(runner, num_blocks)
        self.grower = self.make_grower(runner, self.sent, table)
        self.grown: dict[int, dict[tuple[int, ...], int]] = {}

    def sent(self, address: str, epoch: int, nodes: Delivery) -> None:
        paths: list[tuple[int, ...]] = []
        for token_id, parent, rank, kind in zip(nodes.ids, nodes.parents, nodes.ranks, nodes.kinds, strict=True):
            before = () if parent == ROOT else paths[parent]
            paths.append((*before, token_id))
            if rank == 0 and kind in (
                NodeKind.DETERMINISTIC,
                NodeKind.SAMPLED,
            ):  # others are made when they turn likely
                self.grown[nodes.ticket][(nodes.root_len, *before)] = token_id

    def run(self, temperature: float) -> dict[int, dict[tuple[int, ...], int]]:
        """Return what was proposed first after each path, by the committed length that it hangs under."""
        ids = {slot: prompt(slot) for slot in range(NUM_SLOTS)}
        for slot in ids:
            self.grown[slot] = {}
            job = open_job(slot, ids[slot], temperature=temperature, seed=slot)
            self.grower.handle(replace(job, speculation=Speculation(3, 3)))
        for _ in range(8):
            for slot, known in ids.items():
                self.grower.handle(AdvanceJob(1, slot, slot, NUM_PROMPT, tuple(known[NUM_PROMPT:])))
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


@pytest.mark.parametrize("table", [None, Ngram()], ids=["alone", "drafted for"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_short_of_memory_drafts_the_same(
    runner: ModelRunner, temperature: float, table: SequenceDrafter | None
) -> None:
    """Also when a tree loses its memory half-way: it is grown again as it was."""
    expected = Draft(runner, LARGE).run(temperature)
    small = Draft(runner, SMALL, table)
    found = small.run(temperature)
    assert small.count("preemptions_total") > 0
    assert small.pool.num_in_use == 0
    num_both = 0
    for slot, grown in found.items():
        both = grown.keys() & expected[slot].keys()
        assert {path: grown[path] for path in both} == {path: expected[slot][path] for path in both}
        num_both += len(both)
    assert num_both > 100
