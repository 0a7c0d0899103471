"""What leaves a draft and when: by counts and times, and so that a target has the draft's tree whatever came before."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.growing import pushing
from draft_service.growing.pushing import NUM_URGENT, PUSH_S, NodeSender
from draft_service.slots.draft_slot import DraftSlot
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import MAX_NODES, Delivery, NodeKind
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseDistributions
from target_service.leases.draft_buffer import DraftBuffer
from tests.unit.outrider.engine.speculation.growing import COUPLED, PROMPT, REJECTION, RULES, Draft

PLENTY = 1 << 30


class Course:
    """A draft whose messages go into a target's mirror, at times that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft: Draft) -> None:
        engine: Any = SimpleNamespace(answer=lambda send: send(), flush=lambda: None)
        job: Any = SimpleNamespace(target_address="target:1", target_epoch=3)
        slot: Any = SimpleNamespace(params=draft.params)
        self.draft, self.sent, self.now, self.buffer = draft, list[Delivery](), 100.0, DraftBuffer()
        tree: Any = draft.tree
        self.growing = DraftSlot(job, slot, draft.shares, is_growing=True, ticket=7, num_urgent=NUM_URGENT)
        self.growing.tree = tree
        self.pusher = NodeSender(engine, self.take, WorkerMetrics("draft"))
        monkeypatch.setattr(pushing.time, "monotonic", lambda: self.now)

    def take(self, address: str, epoch: int, nodes: Delivery) -> None:
        assert (address, epoch, nodes.ticket) == ("target:1", 3, 7) and len(nodes.ids) <= MAX_NODES
        self.sent.append(nodes)
        self.buffer.insert(nodes, self.draft.committed, PLENTY)

    def push(self, *, after_s: float = 1.0) -> int:
        """Return how many messages left."""
        self.now, before = self.now + after_s, len(self.sent)
        self.pusher.push_due(self.growing)
        return len(self.sent) - before

    def commit(self, ids: list[int]) -> None:
        self.draft.commit(ids)
        self.buffer.advance(ids, 0, None)


def drawn(draft: Draft, node: int = ROOT) -> Any:
    """What is below a node, as both sides have it."""
    tree = draft.tree
    return {tree.ids[c]: (tree.ranks[c], tree.kinds[c], drawn(draft, c)) for c in tree.children(node)}


def mirrored(buffer: DraftBuffer, node: int = ROOT) -> Any:
    tree = buffer.tree
    return {tree.ids[c]: (tree.ranks[c], buffer.tokens[c].kind, mirrored(buffer, c)) for c in tree.children(node)}


def _new(nodes: Delivery) -> list[int]:
    return [node for node, kind in enumerate(nodes.kinds) if kind is not NodeKind.REFERENCE]


def _path(nodes: Delivery, node: int) -> list[int]:
    """Ids of what leads to a node, itself left out."""
    parent = nodes.parents[node]
    return [] if parent == ROOT else [*_path(nodes, parent), nodes.ids[parent]]


@pytest.mark.parametrize("rule", [{}, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
@given(
    turns=st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 3)), min_size=1, max_size=8),
    world=st.integers(0, 99),
)
@settings(max_examples=25)
def test_the_target_has_the_tree_that_grows(rule: dict[str, Any], turns: list[Any], world: int) -> None:
    """Through messages of some of it, each under what was committed when it left."""
    with pytest.MonkeyPatch.context() as patch:
        course = Course(patch, Draft(world=world, **rule))
        for num_steps, pushes, hit in turns:
            course.draft.grow(num_steps, most=2)
            if pushes:
                course.push()
                assert mirrored(course.buffer) == drawn(course.draft)
            ids = course.draft.ids_after(ROOT)
            course.commit([ids[hit] if hit < len(ids) else 23])
        course.draft.grow(3)
        course.push()
        assert mirrored(course.buffer) == drawn(course.draft)


def test_a_message_has_the_reference_nodes_of_its_nodes_and_their_distributions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = Course(monkeypatch, Draft(supports_trees=False, **REJECTION).grow(2, most=1))
    course.growing.spent_s = 0.0025
    assert course.push() == 1
    course.draft.grow(1, most=1)
    assert course.push() == 1
    first, second = course.sent
    assert [each.draft_us for each in course.sent] == [2500, 1], (
        "what it took, and never a field that would be left out"
    )
    assert (first.kinds, second.kinds) == ([NodeKind.SAMPLED] * 2, [NodeKind.REFERENCE] * 2 + [NodeKind.SAMPLED])
    assert [each.rows.num_rows for each in course.sent if isinstance(each.rows, DenseDistributions)] == [2, 1]
    assert (second.ids[:2], second.parents, second.root_len) == (first.ids, [-1, 0, 1], len(PROMPT))


@RULES
def test_a_large_tree_leaves_in_messages_that_keep_siblings_together(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "MAX_IN_MESSAGE", 16)
    course = Course(monkeypatch, Draft(**rule).grow())
    assert course.push() > 3
    for nodes in course.sent[:-1]:
        assert sum(kind is not NodeKind.REFERENCE for kind in nodes.kinds) >= 16
    hung_under = [tuple(_path(nodes, node)) for nodes in course.sent for node in _new(nodes)]
    in_messages = [{tuple(_path(nodes, node)) for node in _new(nodes)} for nodes in course.sent]
    assert sum(map(len, in_messages)) == len(set(hung_under))
    assert mirrored(course.buffer) == drawn(course.draft)


def test_messages_of_whole_distributions_stay_far_below_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, Draft(**REJECTION).grow())
    distribution_bytes = 4 * course.draft.vocab_size
    monkeypatch.setattr(pushing, "MAX_MESSAGE_BYTES", 7 * distribution_bytes)
    num_laws = sum(bool(course.draft.ids_after(node)) for node in course.draft.tree.fed) + 1
    assert course.push() >= num_laws / 3 > 1
    sizes = [len(nodes.rows.data) for nodes in course.sent if isinstance(nodes.rows, DenseDistributions)]
    assert max(sizes) == 3 * distribution_bytes, "as many as half a message takes"
    assert mirrored(course.buffer) == drawn(course.draft)


@RULES
def test_what_a_target_waits_for_leaves_at_once_then_now_and_then(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But laws leave as they are drawn: nothing that may take a time set by them comes before."""
    course = Course(monkeypatch, Draft(**rule))
    for _ in range(NUM_URGENT):
        course.draft.grow(1, most=1)
        assert course.push(after_s=0.0) == 1
    course.draft.grow(1, most=1)
    if rule is REJECTION:
        assert course.push(after_s=0.0) == 1
        return
    assert course.push(after_s=0.6 * PUSH_S) == 0
    assert course.push(after_s=0.6 * PUSH_S) == 1
    course.draft.grow()
    assert course.push(after_s=0.0) >= 1, "and at once where nothing more is grown"
    assert course.push() == 0


@pytest.mark.parametrize(("rule", "num_early"), [({}, 0), (COUPLED, 0), (REJECTION, 3)])
def test_a_fixed_number_is_sent_as_a_whole_but_for_distributions(
    rule: dict[str, Any], num_early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(monkeypatch, Draft(speculation=Speculation(4, 4), supports_trees=False, **rule))
    early = 0
    for _ in range(3):
        course.draft.grow(1)
        early += course.push()
    assert early == num_early
    course.draft.grow(1)
    assert course.push() == 1 and len(course.buffer.chain(9)) == 4 and course.buffer.is_ended


def test_the_end_of_the_draft_tokens_is_sent_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    wish = Speculation(4, 4)
    course = Course(monkeypatch, Draft(speculation=wish, max_tokens=3, **REJECTION).grow(1))
    course.push()
    assert not course.buffer.is_ended
    course.draft.grow()
    course.push()
    assert course.buffer.is_ended and len(course.buffer.chain(9)) == 2, "there is room for no more"


@RULES
def test_what_was_lost_is_sent_again_when_nothing_lay_ready(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(monkeypatch, Draft(**rule).grow(3))
    assert course.push() > 0
    course.buffer = DraftBuffer()  # none of it came
    course.draft.grow(2)
    course.push()
    assert mirrored(course.buffer) != drawn(course.draft), "what hangs under what is lost is of no use"
    course.commit(course.draft.ids_after(ROOT)[:1])
    course.draft.tree.resend()
    course.push()
    assert mirrored(course.buffer) == drawn(course.draft)


def test_an_end_is_sent_once_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, Draft().grow(1))
    course.draft.tree.ended.extend([ROOT] * 2)
    course.push()
    assert course.sent[-1].ends == [ROOT]
