"""When a request has its target draft for itself, and how much. Rounds between real workers: tests/e2e."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from gateway.admission.requests import Demand, FieldNames, check_demand
from gateway.api.schemas import SpeculationBody
from gateway.generation import GenerationRequest, ServedFacts, SpeculationOptions
from gateway.planning.planner import TargetPlanner
from gateway.rounds.draft_length import TargetDrafts
from gateway.rounds.session import Session
from outrider.client.types import Drafter as SdkDrafter
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import DRAFTERS, Drafter
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.scripted_pool import INFO, connection_of, link_of, served_model


def connection(*offered: Drafter) -> Any:
    made = connection_of()
    made.info = pb.WorkerInfo()
    made.info.CopyFrom(INFO)
    made.info.drafters.extend(each.value for each in offered)
    return made


NGRAM = (Drafter.NGRAM, Drafter.LOOKUP)


MEMBER: Any = SimpleNamespace(planner=TargetPlanner())
"""Of the target, as far as it is read."""


def own_drafts(wish: SpeculationOptions, max_tokens: int = 50, **settings: Any) -> TargetDrafts:
    model = served_model({}, {}, gateway=GatewayConfig(target="127.0.0.1:9", **({"num_draft_tokens": 5} | settings)))
    request = GenerationRequest("r", "m", (1, 2), SamplingParams(max_tokens=max_tokens), speculation=wish)
    return TargetDrafts(model, Session(request, model.reference.tokenizer, 1))


def planned(own: TargetDrafts, target: Any) -> int | None:
    """K; None where a draft worker is asked."""
    plan = own.plan(target, MEMBER)
    return None if plan is None else plan.num_draft_tokens


def test_a_target_without_the_drafter_leaves_it_to_a_model_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, target = own_drafts(SpeculationOptions(), drafter="bigram"), connection(*NGRAM)
    with caplog.at_level(logging.WARNING):
        assert [planned(own, target) for _ in range(3)] == [None] * 3
    assert [record.message for record in caplog.records] == [
        "the target model has no drafter bigram: its requests are drafted for by a model"
    ]
    assert not own.open_message(target).drafter


def demand(drafter: Drafter | None) -> Demand:
    wish = SpeculationOptions(drafter=drafter)
    names = FieldNames(prompt="prompt")
    return Demand(
        request_id="r",
        model="",
        prompts=("x",),
        names=names,
        params=SamplingParams(),
        max_tokens=4,
        seed=1,
        speculation=wish,
    )


def test_a_drafter_that_nobody_has_is_refused_with_those_there_are() -> None:
    facts = ServedFacts("m", 512, 128, 0, 320, None, (Drafter.NGRAM, Drafter.UNIGRAM))
    for drafter in (None, Drafter.NGRAM, Drafter.UNIGRAM):
        assert check_demand(demand(drafter), [facts]) is facts
    refusal = r"drafter is bigram, .* offered: ngram, unigram; .*OUTRIDER_TARGET_DRAFTER_TEXT=FILE"
    with pytest.raises(InvalidRequest, match=refusal):
        check_demand(demand(Drafter.BIGRAM), [facts])
    for drafter in (Drafter.MODEL, Drafter.NGRAM_MODEL):
        with pytest.raises(InvalidRequest, match="offered: ngram, unigram") as error:
            check_demand(demand(drafter), [facts])
        assert error.value.param == "speculation.drafter"


def test_what_may_be_asked_for_is_what_workers_say() -> None:
    target, draft = connection(*NGRAM), connection_of()
    model = served_model({"target-0": link_of(target, target.info)}, {"draft-0": link_of(draft)})
    assert model.facts().drafters == (Drafter.MODEL, *NGRAM, Drafter.NGRAM_MODEL, Drafter.LOOKUP_MODEL)
    model.drafts["draft-0"].link.connection = None  # type: ignore[assignment]
    assert Drafter.MODEL in model.facts().drafters  # it may be back
    model.drafts.clear()
    assert model.facts().drafters == NGRAM
    model.has_draft_pool = True  # whose workers are all gone for now
    assert Drafter.NGRAM_MODEL in model.facts().drafters


def test_every_side_knows_the_same_names() -> None:
    names = list(DRAFTERS)
    assert [each.value for each in SdkDrafter] == names
    for owner in (SpeculationBody, GatewayConfig):
        annotation = owner.model_fields["drafter"].annotation
        literal = next((each for each in get_args(annotation) if get_args(each)), annotation)
        assert list(get_args(literal)) == names
