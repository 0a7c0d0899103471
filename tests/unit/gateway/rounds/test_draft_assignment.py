"""Which draft a request is given, how long it stays, and when it is left."""

from typing import Any

import pytest

from gateway.rounds.draft_assignment import DraftAssignment
from gateway.workers.member import DraftMember, PairingResult, State, TargetMember
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.drafters import Drafter
from tests.unit.gateway.rounds.drafts import draft_link, given, lost, mixed
from tests.unit.gateway.scripted_pool import connection_of, link_of, served_model


def test_a_beam_search_is_given_a_draft_that_can_search_as_soon_as_there_is_one() -> None:
    """A head cannot, and is asked as little as the model is."""
    model = mixed()
    target, small, head = model.targets["a"], model.drafts["small"], model.drafts["pairs"]
    assert small.link.info is not None and head.link.info is not None
    head.link.info.ClearField("drafters")
    small.link.info.supports_beams = True
    small.num_choices = 20
    assert (given(model, Drafter.MODEL), given(model, Drafter.MODEL, searches=True)) == ("pairs", "small")
    connection, small_link = small.connection, small.link
    lost(model, "small")
    seat = DraftAssignment(model, searches=True)
    assert seat.assign(target) and seat.member is head
    small_link.connection = connection
    assert not seat.may_stay(target)


def paired(draft: DraftMember, target: TargetMember, why: str | None) -> None:
    assert draft.connection is not None and target.connection is not None
    draft.pairings[target.name] = PairingResult(draft.connection, target.connection, why)


def test_a_head_serves_its_paired_targets_while_both_are_connected() -> None:
    link = draft_link()
    link.info.needs_features = True
    model = served_model({name: link_of(connection_of()) for name in "ab"}, {"head": link})
    head, (a, b) = model.drafts["head"], model.targets.values()
    assert head.state is State.LOST and not DraftAssignment(model, Drafter.MODEL).assign(a), "nothing is known of it"

    paired(head, a, None)
    paired(head, b, "it is another target's head")
    assert head.state is State.SERVING, "of one target"
    answer = DraftAssignment(model, Drafter.MODEL)
    assert answer.assign(a) and answer.may_stay(a)
    assert not answer.may_stay(b), "an answer that moves there goes on without it"
    assert not DraftAssignment(model, Drafter.MODEL).assign(b)

    a_link: Any = a.link
    a_link.connection = connection_of()  # another life
    assert head.is_pairing_due(a) and not answer.may_stay(a)
    assert head.state is State.SERVING, "what its last known targets said still stands"
    paired(head, a, "it reads the wrong states")
    assert head.state is State.REFUSED


@pytest.mark.parametrize("change", [{"tokenizer_fingerprint": "other"}, {"vocab_size": 160}])
def test_a_draft_of_other_tokens_serves_the_targets_whose_own_it_has_learnt(change: dict[str, Any]) -> None:
    link = draft_link()
    link.info.MergeFrom(pb.WorkerInfo(**change))
    model = served_model({name: link_of(connection_of()) for name in "ab"}, {"draft": link})
    draft, (a, b) = model.drafts["draft"], model.targets.values()
    assert not draft.is_pairing_due(a) and not DraftAssignment(model, Drafter.MODEL).assign(a), "it does not translate"

    link.info.supports_retokenization = True
    assert draft.is_pairing_due(a) and not DraftAssignment(model, Drafter.MODEL).assign(a), "it does not know them yet"
    paired(draft, a, None)
    assert DraftAssignment(model, Drafter.MODEL).assign(a) and not DraftAssignment(model, Drafter.MODEL).assign(b)
    paired(draft, b, "they have nothing in common")
    assert draft.state is State.SERVING and not draft.is_pairing_due(b)

    b_link: Any = b.link
    b_link.info = pb.WorkerInfo()
    b_link.info.CopyFrom(link.info)
    assert DraftAssignment(model, Drafter.MODEL).assign(b), "which has the draft's own tokens, by now"


def drafted_for(num_drafts: int) -> tuple[ServedModel, DraftAssignment]:
    """A request that has the first of so many drafts."""
    drafts = {f"draft-{index}": link_of(connection_of()) for index in range(num_drafts)}
    model = served_model({"a": link_of(connection_of())}, drafts)
    seat = DraftAssignment(model)
    assert seat.assign(model.targets["a"])
    assert seat.member is model.drafts["draft-0"]
    return model, seat


def moved(model: ServedModel, seat: DraftAssignment) -> bool:
    if seat.may_stay(model.targets["a"]):
        return False
    seat.leave()
    return True


async def test_a_draft_that_lies_to_several_is_left_alone_by_all() -> None:
    model, seat = drafted_for(1)
    others = [DraftAssignment(model) for _ in range(2)]
    for other in others:
        assert other.assign(model.targets["a"])
    for each in (seat, *others):
        each.note_refused()
    assert model.drafts["draft-0"].health.is_down
    assert all(moved(model, each) for each in (seat, *others))
    assert not DraftAssignment(model).assign(model.targets["a"]), "steps are plain"
