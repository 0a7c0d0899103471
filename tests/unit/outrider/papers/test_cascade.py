"""A draft that is a model and drafted for by a table: it proposes the same, to the last bit, in fewer forwards."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.slot_jobs import AdvanceJob
from outrider.drafting.lookup import Lookup
from outrider.drafting.ngram import Ngram
from outrider.drafting.sequence_drafter import SequenceDrafter
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.row_cost import RowCost
from outrider.engine.worker.jobs import CloseJob
from outrider.wire.kinds import AcceptanceRule, DraftLogprobs
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.transport.codec import DenseDistributions
from tests.tiny_models import tiny_llama
from tests.unit.target_service.step.test_step import BLOCK_SIZE, LARGE, Base, load, open_job, prompt

FULL = DraftLogprobs.FULL
CHAIN = Speculation(4, 8, is_sequential=True, draft_logprobs=FULL)
NAMED = Speculation("auto", 8, TreeShape.parse("2x2x1"), is_sequential=True, draft_logprobs=FULL)
AHEAD = Speculation("auto", 8, draft_logprobs=FULL)
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 0.5, "seed": 5, "acceptance": AcceptanceRule.COUPLED}
REJECTION: dict[str, Any] = {"temperature": 0.5, "seed": 5}
Sent = Mapping[tuple[int, ...], tuple[int, NodeKind, bytes]]
"""By committed length and the ids that lead to a node: its rank, its kind, and the law that it was drawn from."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0))


class Cost(RowCost):
    """What no clock decides."""

    def __init__(self, base: float = 1.0) -> None:
        super().__init__()
        self.reach = 32
        self._base = base

    def seconds(self, num_rows: int | Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        return self._base ** np.asarray(num_rows)

    def note(self, num_rows: int, seconds: float) -> None: ...


class Draft(Base):
    """A grower, and a gateway that goes on when all is grown."""

    def __init__(self, runner: ModelRunner, table: SequenceDrafter | None = None, cost: Cost | None = None) -> None:
        super().__init__(runner, LARGE)
        self.grower = self.make_grower(runner, self.sent, table)
        self.grower._scheduler.cost = cost or Cost()
        self.nodes: dict[tuple[int, ...], tuple[int, NodeKind, bytes]] = {}
        self.num_drawn: list[int] = []
        """How many drawn tokens each message has."""

    def sent(self, address: str, epoch: int, nodes: Delivery) -> None:
        paths, laws = list[tuple[int, ...]](), dict[tuple[int, ...], bytes]()
        size = 0 if not isinstance(nodes.rows, DenseDistributions) else len(nodes.rows.data) // nodes.rows.num_rows
        for token_id, parent, rank, kind in zip(nodes.ids, nodes.parents, nodes.ranks, nodes.kinds, strict=True):
            before = (nodes.root_len,) if parent == ROOT else paths[parent]
            paths.append((*before, token_id))
            law = b""
            if kind is NodeKind.SAMPLED:
                assert isinstance(nodes.rows, DenseDistributions)
                law = laws.setdefault(before, nodes.rows.data[len(laws) * size :][:size])
            if kind is not NodeKind.REFERENCE:
                self.nodes[paths[-1]] = (rank, kind, law)
        self.num_drawn.append(nodes.kinds.count(NodeKind.SAMPLED))

    def grow(self) -> None:
        while self.grower.step(time.monotonic()):
            pass

    def answer(self, slot: int, speculation: Speculation, how: dict[str, Any]) -> tuple[Sent, float]:
        """Return what was proposed on the way, and how many forwards that took. Of each proposal a number of tokens is
        committed, and a token of the target's own.
        """
        self.nodes, before, ids = {}, self.num_forwards, prompt(1)
        self.grower.handle(replace(open_job(slot, ids, **how), speculation=speculation, corpus_id=b"one"))
        for turn in range(10):
            self.grower.handle(AdvanceJob(1, slot, slot, len(prompt(1)), tuple(ids[len(prompt(1)) :])))
            self.grow()
            self.check_cache(slot, ids)
            path: tuple[int, ...] = (len(ids),)
            for _ in range((4, 1, 3)[turn % 3]):
                path = next((each for each, (rank, *_) in self.nodes.items() if each[:-1] == path and not rank), path)
            ids += [*path[1:], 2 + 7 * turn % 5]
        self.grower.handle(CloseJob(1, slot))
        return self.nodes, self.num_forwards - before

    def check_cache(self, slot: int, ids: list[int]) -> None:
        """What is committed lies there, and what of the tree was fed: nothing that was merely guessed."""
        kept, growing = self.table.get(1, slot), self.grower._slots[1, slot]
        assert kept is not None
        assert kept.cached == [*ids, *(growing.tree.ids[node] for node in growing.tree.fed)]
        assert kept.table.num_tokens == len(kept.cached)
        assert growing.ahead is None or growing.ahead.follower.num_tokens == len(ids)  # type: ignore[attr-defined]

    @property
    def num_forwards(self) -> float:
        return self.count("batch_size_count")

    def guessed(self, fate: str) -> float:
        labels = {"worker": "target", "fate": fate}
        name = "outrider_worker_guessed_tokens_total"
        return float(self.metrics.registry.get_sample_value(name, labels) or 0)


@pytest.mark.parametrize("how", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize(
    ("speculation", "most"), [(CHAIN, 0.6), (NAMED, 1.0), (AHEAD, 0.9)], ids=["chain", "named tree", "ahead"]
)
def test_the_proposals_are_the_same_in_fewer_forwards(
    runner: ModelRunner, how: dict[str, Any], speculation: Speculation, most: float
) -> None:
    """most: forwards, as a share of those without a table. What is named in breadth takes one for each level anyway."""
    alone = Draft(runner)
    expected = [alone.answer(slot, speculation, how) for slot in (1, 2)]
    draft = Draft(runner, Lookup())
    found = [draft.answer(slot, speculation, how) for slot in (1, 2)]  # the table remembers what was said
    assert [sent for sent, _ in found] == [sent for sent, _ in expected]
    assert min(len(sent) for sent, _ in found) >= 40
    assert found[0][1] <= expected[0][1] and found[1][1] <= most * expected[1][1]
    assert draft.guessed("drawn") > 0 and draft.guessed("dropped") > 0


def test_draws_are_sent_before_it_is_checked_whether_they_were_predicted(runner: ModelRunner) -> None:
    """Under `rejection` no token may come sooner or later for what it is."""
    draft = Draft(runner, Lookup())
    for slot in (1, 2):
        draft.answer(slot, CHAIN, REJECTION)
    assert draft.guessed("drawn") > 0
    assert max(draft.num_drawn) == 1


def test_draft_tokens_use_no_memory_that_other_slots_need(runner: ModelRunner) -> None:
    ids, num_drafts = [7, 8, 9] * BLOCK_SIZE, BLOCK_SIZE + 4

    def grown(table: SequenceDrafter | None, *, is_short: bool) -> tuple[Sent, int]:
        draft = Draft(runner, table)
        speculation = Speculation(num_drafts, num_drafts, is_sequential=True)
        draft.grower.handle(replace(open_job(1, ids), speculation=speculation))
        draft.grower.handle(AdvanceJob(1, 1, 1, len(ids), ()))
        assert draft.grower.step(time.monotonic())  # all but the last token
        others = draft.pool.new_table()
        if is_short:
            others.reserve((draft.pool.num_free - 1) * BLOCK_SIZE)
        draft.grow()
        num_sent = len(draft.nodes)
        others.free()
        draft.grow()
        return draft.nodes, num_sent

    expected, _ = grown(None, is_short=False)
    assert len(expected) == num_drafts
    assert grown(Ngram(), is_short=True) == (expected, 0)  # what is named leaves once it is whole
    assert grown(Ngram(), is_short=False) == (expected, num_drafts)


def test_what_costs_more_than_it_saves_is_not_fed(runner: ModelRunner) -> None:
    draft = Draft(runner, Lookup(), Cost(2.0))
    for slot in (1, 2):
        draft.answer(slot, CHAIN, GREEDY)
    assert draft.guessed("drawn") == draft.guessed("dropped") == 0
