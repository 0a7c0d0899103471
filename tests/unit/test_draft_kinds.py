"""Drafts with a model and without behind one gateway: which of them a request is given, and what may be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.rounds.draft_assignment import DraftAssignment
from gateway.workers.member import DraftMember, Pairing, State, TargetMember
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.settings.config import GatewayConfig
from tests.unit.scripted_pool import INFO, connection_of, link_of, served_model


def draft_link(*drafters: Drafter, **changes: Any) -> Any:
    info = pb.WorkerInfo()
    info.CopyFrom(INFO)
    info.drafters.extend(drafters)
    info.model_id = drafters[0] if drafters else "small"
    link = link_of(connection_of(), info)
    link.connection.info = info
    return link


def mixed(**settings: Any) -> ServedModel:
    drafts = {
        "guesses": draft_link(Drafter.NGRAM),
        "pairs": draft_link(Drafter.BIGRAM),
        "small": draft_link(),
    }
    config = GatewayConfig(target="127.0.0.1:9", **settings)
    return served_model({"a": link_of(connection_of())}, drafts, gateway=config)


def given(model: ServedModel, drafter: Drafter, *, searches: bool = False) -> str | None:
    draft = model.choose_draft(model.targets["a"], drafter=drafter, searches=searches)
    return None if draft is None else draft.name


def lost(model: ServedModel, *names: str) -> None:
    for name in names:
        link: Any = model.drafts[name].link
        link.connection = None


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (Drafter.MODEL, "small"),
        (Drafter.NGRAM, "guesses"),
        (Drafter.BIGRAM, "pairs"),
        (Drafter.NGRAM_MODEL, "small"),
        (Drafter.LOOKUP, "small"),
    ],
)
def test_a_request_is_given_a_draft_of_the_kind_that_it_asks_for(drafter: Drafter, name: str) -> None:
    """However many have that one already; +model leaves only the model to a draft; else a model is the best guess."""
    model = mixed()
    model.drafts[name].num_requests = 20
    assert given(model, drafter) == name


def test_where_that_kind_is_gone_or_full_another_is_better_than_none() -> None:
    model = mixed()
    model.drafts["small"].num_requests = INFO.num_slots
    assert given(model, Drafter.MODEL) == "guesses"
    lost(model, "small", "guesses")
    assert given(model, Drafter.NGRAM) == given(model, Drafter.MODEL) == "pairs"
    lost(model, "pairs")
    assert given(model, Drafter.MODEL) is None


def test_a_request_goes_to_the_kind_that_it_asks_for_as_soon_as_it_may() -> None:
    model = mixed()
    target, small = model.targets["a"], model.drafts["small"]
    connection, small_link = small.connection, small.link
    lost(model, "small")
    seat = DraftAssignment(model, Drafter.MODEL)
    assert seat.take(target) and seat.member is model.drafts["guesses"]
    assert seat.may_stay(target), "the bigrams are no better"
    small_link.connection = connection
    assert not seat.may_stay(target)
    seat.leave()
    assert seat.take(target) and seat.member is small


def test_a_beam_search_is_given_a_draft_that_can_search_as_soon_as_there_is_one() -> None:
    """A head cannot, and is asked as little as the model is."""
    model = mixed()
    target, small, head = model.targets["a"], model.drafts["small"], model.drafts["pairs"]
    assert small.link.info is not None and head.link.info is not None
    head.link.info.ClearField("drafters")
    small.link.info.beams = True
    small.num_requests = 20
    assert (given(model, Drafter.MODEL), given(model, Drafter.MODEL, searches=True)) == ("pairs", "small")
    connection, small_link = small.connection, small.link
    lost(model, "small")
    seat = DraftAssignment(model, searches=True)
    assert seat.take(target) and seat.member is head
    small_link.connection = connection
    assert not seat.may_stay(target)


def test_what_drafts_say_without_a_model_may_be_asked_for() -> None:
    model = mixed()
    assert model.facts().drafters == (Drafter.MODEL, Drafter.NGRAM, Drafter.BIGRAM)
    assert model.facts().draft_id == "small"
    lost(model, "small")
    assert model.facts().draft_id == "ngram"
    assert mixed(drafter="bigram").facts().draft_id == "bigram"


def test_the_request_comes_before_the_gateways() -> None:
    model = mixed(drafter="bigram")

    def request(drafter: Drafter | None) -> GenerationRequest:
        asked = SpeculationOptions(drafter=drafter)
        return GenerationRequest("r", "m", (1,), SamplingParams(max_tokens=1), speculation=asked)

    assert [model.drafter_for(request(each)) for each in (None, Drafter.NGRAM)] == [Drafter.BIGRAM, Drafter.NGRAM]


def test_by_default_all_that_is_there_drafts_and_a_model_alone_where_a_number_is_named() -> None:
    def asked(model: Any, **options: Any) -> Drafter:
        speculation = SpeculationOptions(**options)
        return model.drafter_for(
            GenerationRequest("r", "m", (1,), SamplingParams(max_tokens=1), speculation=speculation)
        )  # type: ignore[no-any-return]

    model = mixed()
    model.draft_pools = ("drafts",)
    assert asked(model) is asked(model, num_draft_tokens="auto") is Drafter.AUTO
    assert asked(model, num_draft_tokens=4) is asked(model, tree=TreeShape.parse("2x2")) is Drafter.MODEL
    assert asked(model, num_draft_tokens=4, drafter=Drafter.AUTO) is Drafter.AUTO
    model.draft_pools = ()
    assert asked(model, num_draft_tokens=4) is Drafter.AUTO


def paired(draft: DraftMember, target: TargetMember, why: str | None) -> None:
    assert draft.connection is not None and target.connection is not None
    draft.pairings[target.name] = Pairing(draft.connection, target.connection, why)


def test_a_head_serves_the_targets_that_it_is_paired_with_as_long_as_both_live() -> None:
    link = draft_link()
    link.info.needs_features = True
    model = served_model({name: link_of(connection_of()) for name in "ab"}, {"head": link})
    head, (a, b) = model.drafts["head"], model.targets.values()
    assert head.state is State.LOST and not DraftAssignment(model, Drafter.MODEL).take(a), "nothing is known of it"

    paired(head, a, None)
    paired(head, b, "it is another target's head")
    assert head.state is State.SERVING, "of one target"
    answer = DraftAssignment(model, Drafter.MODEL)
    assert answer.take(a) and answer.may_stay(a)
    assert not answer.may_stay(b), "an answer that moves there goes on without it"
    assert not DraftAssignment(model, Drafter.MODEL).take(b)

    a_link: Any = a.link
    a_link.connection = connection_of()  # another life
    assert head.lacks_pairing(a) and not answer.may_stay(a)
    assert head.state is State.SERVING, "what its last known targets said still stands"
    paired(head, a, "it reads the wrong states")
    assert head.state is State.REFUSED


@pytest.mark.parametrize("change", [{"tokenizer_fingerprint": "other"}, {"vocab_size": 160}])
def test_a_draft_of_other_tokens_serves_the_targets_whose_own_it_has_learnt(change: dict[str, Any]) -> None:
    link = draft_link()
    link.info.MergeFrom(pb.WorkerInfo(**change))
    model = served_model({name: link_of(connection_of()) for name in "ab"}, {"draft": link})
    draft, (a, b) = model.drafts["draft"], model.targets.values()
    assert not draft.lacks_pairing(a) and not DraftAssignment(model, Drafter.MODEL).take(a), "it does not translate"

    link.info.translates = True
    assert draft.lacks_pairing(a) and not DraftAssignment(model, Drafter.MODEL).take(a), "it does not know them yet"
    paired(draft, a, None)
    assert DraftAssignment(model, Drafter.MODEL).take(a) and not DraftAssignment(model, Drafter.MODEL).take(b)
    paired(draft, b, "they have nothing in common")
    assert draft.state is State.SERVING and not draft.lacks_pairing(b)

    b_link: Any = b.link
    b_link.info = pb.WorkerInfo()
    b_link.info.CopyFrom(link.info)
    assert DraftAssignment(model, Drafter.MODEL).take(b), "which has the draft's own tokens, by now"
