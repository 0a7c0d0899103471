"""A draft without a model on a scripted engine: what it proposes, that a slot's follower is what is committed there,
and that nothing is left of slots that have ended, however they did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draft_service import active
from draft_service.jobs import PartOut, Proposed, ProposeJob
from draft_service.table_proposer import TableProposer, TableSlot
from outrider.drafting.drafter import SequenceDrafter
from outrider.drafting.lookup import Lookup
from outrider.drafting.ngram import Ngram
from outrider.drafting.tables import Unigram
from outrider.engine.sampling.chain import draw_chain
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.sampling.wire_tensors import decode_laws
from outrider.engine.worker.jobs import CloseJob, Fault, Opened, OpenJob, OwnerGone, TruncateJob
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import OpenSlots
from outrider.wire.kinds import AcceptanceRule, DraftLogprobs
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.transport.codec import Rows

VOCAB, CONTEXT, MAX_SLOTS = 16, 64, 3
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
MAX_TOKENS = 40


class AtOnce:
    """An engine whose answers leave at once."""

    def answer(self, send: Callable[[], None]) -> None:
        send()


class Draft:
    def __init__(self, drafter: SequenceDrafter | None = None) -> None:
        self.drafter = drafter or Ngram()
        self.metrics, self.parts = WorkerMetrics("draft"), list[PartOut]()
        self.table = OpenSlots(partial(TableSlot, self.drafter), MAX_SLOTS, CONTEXT)
        self.keeper = SlotKeeper(self.table, AtOnce(), self.metrics, VOCAB, ())  # type: ignore[arg-type]
        engine: Any = AtOnce()
        self.proposer = TableProposer(self.keeper, engine, self.parts.append, self.metrics, VOCAB)
        self._tickets = 0

    def open(self, slot: int, ids: list[int], owner: int = 1, num_prompt: int | None = None, **options: Any) -> Any:
        answers: list[Any] = []
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0, **options})
        num_prompt = len(ids) if num_prompt is None else num_prompt
        job = OpenJob(owner, slot, tuple(ids), num_prompt, params, answers.append, deliver_to="t:1", target_epoch=9)
        self.proposer.handle(job)
        return answers[0]

    def ask(
        self,
        slot: int,
        base_len: int,
        ids: list[int] | None = None,
        *,
        k: int = 4,
        owner: int = 1,
        encoding: DraftLogprobs = DraftLogprobs.AUTO,
        topk: int = 8,
    ) -> list[Any]:
        """What is answered, as it comes."""
        answers: list[Any] = []
        self._tickets += 1
        now = time.monotonic()
        job = ProposeJob(owner, slot, base_len, tuple(ids or ()), k, self._tickets, encoding, topk, now, answers.append)
        self.proposer.handle(job)
        return answers

    def proposed(self, *args: Any, **options: Any) -> tuple[Proposed, list[PartOut]]:
        """And the parts that went to the target."""
        del self.parts[:]
        answers = self.ask(*args, **options)
        assert self.proposer.step(time.monotonic()) and not self.proposer.step(time.monotonic())
        (result,) = answers
        assert isinstance(result, Proposed), result
        assert [token_id for part in self.parts for token_id in part.draft_ids] == list(result.draft_ids)
        for part in self.parts:
            assert (part.address, part.target_epoch, part.ticket) == ("t:1", 9, self._tickets)
        return result, self.parts

    def expected(self, ids: list[int], k: int, topk: int | None = None, **options: Any) -> Any:
        """Of a follower that has seen nothing but these ids."""
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0, **options})
        state = SamplingState(params, PROMPT, ())
        state.set_output(ids[len(PROMPT) :])
        return draw_chain(Ngram().open(ids, len(PROMPT)).walk(), state, len(ids), k, VOCAB, topk)


def rows_of(part: PartOut) -> Rows:
    assert part.rows is not None
    return part.rows


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_k": 2, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 7, "acceptance": AcceptanceRule.COUPLED},
]


@pytest.mark.parametrize("options", SAMPLED)
def test_a_drawn_proposal_comes_with_the_laws_that_it_was_drawn_from(options: dict[str, Any]) -> None:
    draft, ids = Draft(), [*PROMPT, 3, 9, 9, 3, 4, 9, 1, 2]
    draft.open(1, ids, num_prompt=len(PROMPT), **options)
    result, parts = draft.proposed(1, len(ids))
    chain = draft.expected(ids, 4, **options)
    assert list(result.draft_ids) == chain.ids and len(chain.ids) > 1
    if chain.laws is None:
        assert all(part.rows is None for part in parts)
        return
    shipped = [law for part in parts for law in decode_laws(rows_of(part), VOCAB, [[each] for each in part.draft_ids])]
    for own, drawn_from in zip(shipped, chain.laws, strict=True):
        assert np.array_equal(own.dense_scores(), drawn_from.dense_scores())


def test_laws_are_cut_before_the_draw_where_that_is_asked_for_or_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    for budget, encoding, most in (
        (1 << 20, DraftLogprobs.TOPK, 2),
        (1, DraftLogprobs.AUTO, 2),
        (1, DraftLogprobs.FULL, VOCAB),
    ):
        monkeypatch.setattr(active, "FULL_LOGPROBS_BUDGET_BYTES", budget)
        draft = Draft(Unigram(list(range(VOCAB))))
        draft.open(1, PROMPT, **options)
        _, parts = draft.proposed(1, len(PROMPT), encoding=encoding, topk=2)
        laws = [law for part in parts for law in decode_laws(rows_of(part), VOCAB, [[each] for each in part.draft_ids])]
        assert len(laws) == 4 and all(law.support()[0].size == most for law in laws)


def test_a_proposal_ends_where_there_is_nothing_more_to_say() -> None:
    """Of what was said in a slot that has ended, its prompt apart."""
    draft = Draft(Lookup(1, 4))
    draft.open(1, [8, 5, 6, 1], num_prompt=1)
    draft.proposer.handle(CloseJob(1, 1))
    draft.open(1, [9, 5])
    result, (part,) = draft.proposed(1, 2, k=8)
    assert result.draft_ids == (6, 1) and part.num_draft_tokens == 2
    draft.open(2, [9, 8])
    assert draft.proposed(2, 2)[0].draft_ids == ()


class Messages(RuleBasedStateMachine):
    """In any order, from two gateways: a slot says what one says that was opened for its committed tokens."""

    ids = st.lists(st.integers(0, 3), max_size=6)
    owners = st.integers(1, 2)
    numbers = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.draft = Draft()
        self.committed: dict[tuple[int, int], list[int]] = {}
        self.waiting: list[list[Any]] = []

    @rule(owner=owners, slot=numbers, more=ids)
    def open(self, owner: int, slot: int, more: list[int]) -> None:
        answer = self.draft.open(slot, [*PROMPT, *more], owner, num_prompt=len(PROMPT))
        if isinstance(answer, Opened):
            self.committed[owner, slot] = [*PROMPT, *more]
        else:
            assert answer.fault is Fault.EXHAUSTED and len(self.committed) == MAX_SLOTS

    @rule(owner=owners, slot=numbers, base=st.floats(0, 1.3), more=ids, k=st.integers(1, 4))
    def propose(self, owner: int, slot: int, base: float, more: list[int], k: int) -> None:
        known = self.committed.get((owner, slot))
        base_len = int(base * len(known or PROMPT))
        answers = self.draft.ask(slot, base_len, more, owner=owner, k=k)
        self.waiting.append(answers)
        if known is None:
            assert answers[0].fault is Fault.UNKNOWN_SLOT
        elif base_len > len(known):
            assert (answers[0].fault, answers[0].known_len) == (Fault.BEHIND, len(known))
        elif base_len + len(more) < len(PROMPT) or base_len + len(more) >= len(PROMPT) + MAX_TOKENS:
            assert answers[0].fault is Fault.INVALID
        else:
            self.committed[owner, slot] = [*known[:base_len], *more]

    @rule(owner=owners, slot=numbers, length=st.integers(0, 30))
    def truncate(self, owner: int, slot: int, length: int) -> None:
        self.draft.proposer.handle(TruncateJob(owner, slot, length, "rejected"))

    @rule(owner=owners, slot=numbers)
    def close(self, owner: int, slot: int) -> None:
        self.draft.proposer.handle(CloseJob(owner, slot))
        self.committed.pop((owner, slot), None)

    @rule(owner=owners)
    def gone(self, owner: int) -> None:
        self.draft.proposer.handle(OwnerGone(owner))
        self.committed = {key: ids for key, ids in self.committed.items() if key[0] != owner}

    @precondition(lambda self: self.waiting)
    @rule()
    def step(self) -> None:
        self.draft.proposer.step(time.monotonic())
        assert all(len(answers) == 1 for answers in self.waiting)
        self.waiting.clear()

    @invariant()
    def follows_what_is_committed(self) -> None:
        assert {slot.key: slot.committed for slot in self.draft.table} == self.committed
        for slot in self.draft.table:
            walk, anew = slot.follower.walk(), Ngram().open(slot.committed, len(PROMPT)).walk()
            found, expected = walk.next(), anew.next()
            assert slot.follower.num_tokens == len(slot.committed)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])

    def teardown(self) -> None:
        for owner in (1, 2):
            self.draft.proposer.handle(OwnerGone(owner))
        assert self.draft.table.num_in_use == 0 and not self.draft.proposer.step(time.monotonic())
        queue = self.draft.proposer._queue
        assert not queue.active and not queue._routes and not self.draft.keeper._states
        assert all(len(answers) == 1 for answers in self.waiting)


Messages.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMessages = Messages.TestCase
