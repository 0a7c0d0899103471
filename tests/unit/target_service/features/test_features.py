"""Rows of features in the engine thread: who gets which, in what order, and what is kept and let go. A small model.

What the rows say is compared with transformers over real gRPC, in tests/service/test_features.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.engine.heads.projection import Projection, ProjectionSpec
from outrider.engine.model_runner import ModelRunner
from outrider.engine.worker.jobs import CloseJob, CloseOwnerJob, JobError
from outrider.wire.errors import Unavailable
from target_service.features import features as module
from target_service.features.features import FeatureSubscription
from target_service.leases.lease_jobs import Verdict, VerifyJob
from tests.tiny_models import tiny_llama
from tests.unit.target_service.step.test_step import LARGE, NUM_PROMPT, SMALL, Target, load, open_job, prompt

HEAD, OTHER = b"a head", b"another head"
WIDTH = 4
ROW_BYTES = 2 * WIDTH


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0))


def projection(taps: tuple[int, ...] = (0, 2), seed: int = 0) -> Projection:
    spec = ProjectionSpec(taps, WIDTH)
    weights = torch.randn(spec.shapes(32)["fc"], generator=torch.Generator().manual_seed(seed))
    return Projection(spec, {"fc": weights})


class Link:
    """A draft at the other end, which keeps what it gets."""

    def __init__(self) -> None:
        self.has_capacity = True
        self.num_dropped = 0
        self.spans: list[tuple[int, int, int]] = []
        """(ticket, start, end) in the order in which they came."""
        self.rows: dict[tuple[int, int], bytes] = {}

    def send_features(self, subscription: FeatureSubscription, start: int, num_rows: int, data: bytes) -> None:
        assert num_rows and len(data) == num_rows * ROW_BYTES and self.has_capacity
        ticket = subscription.ticket
        self.spans.append((ticket, start, start + num_rows))
        for i in range(num_rows):
            row = data[i * ROW_BYTES : (i + 1) * ROW_BYTES]
            assert self.rows.setdefault((ticket, start + i), row) == row, "a position has one row"

    def count(self, fate: str, num_rows: int, num_bytes: int) -> None:
        assert fate == "dropped" and num_bytes == num_rows * ROW_BYTES
        self.num_dropped += num_rows

    def ends(self, ticket: int = 0) -> int:
        """Return where the rows of a ticket end, which came from 0 on without a gap."""
        end = 0
        for of, start, until in self.spans:
            if of == ticket:
                assert start <= end, f"rows {end} to {start} are missing"
                end = max(end, until)
        return end


class Served(Target):
    """A target at which a head is registered."""

    def __init__(self, runner: ModelRunner, num_blocks: int = LARGE, **options: Any) -> None:
        super().__init__(runner, num_blocks, **options)
        self.link = Link()
        self.runner = runner
        self.add(HEAD, projection())

    def heard(self, slot: int, result: Verdict | JobError) -> None:
        if isinstance(result, Verdict):  # a lease that is ended has no more to say
            super().heard(slot, result)

    def add(self, digest: bytes, made: Projection) -> None:
        self.features.add_head(digest, made)

    def want(self, slot: int = 0, start: int = 0, link: Link | None = None, digest: bytes = HEAD) -> None:
        self.features.subscribe(FeatureSubscription(link or self.link, digest, slot, start))

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.step_once_held_no_more()

    def fed_len(self, slot: int = 0) -> int:
        """Return up to where tokens that stay were fed."""
        found = self.table.get(1, slot)
        assert found is not None
        return len(found.cached)


@pytest.fixture
def target(runner: ModelRunner) -> Any:
    served = Served(runner)
    yield served
    served.features.drop_head(HEAD)
    served.features.drop_head(OTHER)
    assert not served.features._buffers


def test_features_come_as_they_are_made_without_a_gap_whatever_was_requested_first(target: Served) -> None:
    target.want(0)
    target.open(0, prompt(0))
    target.open(1, prompt(1))
    target.steps(6)
    assert target.link.ends(0) == target.fed_len(0) > NUM_PROMPT
    assert target.link.ends(1) == 0, "nobody asked for those"
    target.want(1)
    assert target.link.ends(1) == target.fed_len(1), "what is kept comes at once"
    target.steps(2)
    assert target.link.ends(1) == target.fed_len(1)
    target.run()


def test_a_verify_sends_what_is_kept_of_its_own_lease_alone(target: Served) -> None:
    target.want(0)
    target.link.has_capacity = False
    target.open(0, prompt(0))
    target.steps(4)
    target.link.has_capacity = True
    target.open(1, prompt(1))
    assert not target.link.spans, "a verify of one slot takes no time for others"
    target.lease(0, lambda result: target.heard(0, result))
    assert target.link.ends(0) > 0


def test_a_request_begins_at_its_start_and_a_repeated_one_repeats(target: Served) -> None:
    target.open(0, prompt(0))
    target.want(0, start=NUM_PROMPT + 2)
    target.steps(8)
    assert target.link.spans[0][1] == NUM_PROMPT + 2
    before = target.fed_len()
    target.want(0, start=NUM_PROMPT)
    assert target.link.spans[-1] == (0, NUM_PROMPT, before)
    target.want(0, start=10**6)
    target.steps(1)
    assert target.link.spans[-1][2] == before, "nothing that was asked for has come"


def test_requests_before_their_lease_are_bounded(target: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUBSCRIPTIONS", 2)
    for slot in (0, 1, 2):
        target.want(slot)
    for slot in (0, 1, 2):
        target.open(slot, prompt(slot))
    target.steps(4)
    assert {ticket for ticket, _, _ in target.link.spans} == {1, 2}


def test_two_drafts_of_one_answer_each_get_the_rows_under_tickets_of_their_own(target: Served) -> None:
    first, second = Link(), Link()
    target.open(0, prompt(0))
    target.want(9, link=second)  # before the lease
    tickets = [(8, True), (9, True)]
    target.verifier.handle(VerifyJob(1, 0, NUM_PROMPT, (), tickets, 10**6, 0.0, lambda r: target.heard(0, r)))
    target.want(8, link=first)
    target.steps(4)
    assert first.ends(8) == second.ends(9) == target.fed_len() > 0
    target.features.end_link(first)
    before = first.ends(8)
    target.steps(2)
    assert first.ends(8) == before and second.ends(9) == target.fed_len() > before


def test_rows_that_cannot_be_made_are_lost_and_no_step(target: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Projection, taps: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    target.open(0, prompt(0))
    target.want(0)
    target.steps(4)
    before, fed = list(target.link.spans), target.fed_len()
    with monkeypatch.context() as patch:
        patch.setattr(Projection, "forward", fails)
        target.steps(2)
    assert target.link.spans == before and target.fed_len() > fed
    fed = target.fed_len()
    target.steps(1)
    assert target.link.spans[-1][1:] == (fed, target.fed_len()), "the next are those of the next step"


def test_features_for_a_slow_draft_come_later_and_in_order(target: Served) -> None:
    target.open(0, prompt(0))
    target.want(0)
    target.steps(2)
    before, target.link.has_capacity = target.link.ends(), False
    target.steps(4)
    assert target.link.ends() == before < target.fed_len()
    assert target.link.num_dropped == target.fed_len() - before
    target.want(0, start=before)
    assert target.link.ends() == before, "asking again changes nothing"
    target.link.has_capacity = True
    target.steps(1)
    assert target.link.ends() == target.fed_len(), "with the next step"


def test_the_rows_of_all_slots_are_bounded_and_those_of_the_idle_go_first(
    target: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.open(0, prompt(0), max_tokens=2)
    target.verifier.handle(replace(open_job(0, prompt(0)), slot_id=7, speculation=target.speculation))
    target.steps(3)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", (2 * NUM_PROMPT + 10) * ROW_BYTES)
    target.open(1, prompt(1))
    target.steps(4)
    kept = {key[1] for key in target.features._buffers}
    assert 1 in kept and target.features.num_kept_bytes <= module.MAX_KEPT_BYTES
    assert module.MAX_KEPT_TOKENS * ROW_BYTES > module.MAX_KEPT_BYTES


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_slot_that_lost_its_memory_is_fed_again_and_its_rows_come_again(
    runner: ModelRunner, prefix_caching: bool
) -> None:
    """With the same numbers: `Link` compares them."""
    target = Served(runner, SMALL, prefix_caching=prefix_caching)
    for slot in range(4):
        target.want(slot)
        target.open(slot, prompt(slot))
    expected = target.run()
    assert target.count("preemptions_total") > 0
    for slot in range(4):
        assert target.link.ends(slot) >= len(expected[slot]) - 5, "up to the last step"
    target.features.drop_head(HEAD)


def test_a_slot_that_is_closed_opened_again_or_gone_keeps_no_rows(target: Served) -> None:
    for slot in range(3):
        target.open(slot, prompt(slot))
    target.steps(4)
    target.verifier.handle(CloseJob(1, 0))
    assert {key[1] for key in target.features._buffers} == {1, 2}
    target.verifier.handle(replace(open_job(1, prompt(5)), speculation=target.speculation))
    assert {key[1] for key in target.features._buffers} == {2}
    target.verifier.handle(CloseOwnerJob(1))
    assert not target.features._buffers


def test_a_probe_runs_between_steps_and_changes_nothing(target: Served) -> None:
    target.open(0, prompt(0))
    target.want(0)
    target.steps(3)
    in_use = target.pool.num_in_use
    reply = target.features.probe(prompt(3, 20), (-1, 0, 1))
    assert target.pool.num_in_use == in_use
    assert len(reply.taps) == 20 * 3 * 32 * 2 and len(reply.best_ids) == 20
    with pytest.raises(Unavailable, match="10"):
        target.features.probe((10**6,), (0,))
    assert target.pool.num_in_use == in_use
    target.steps(3)
    assert target.link.ends() == target.fed_len(), "steps have the heads' taps again"
