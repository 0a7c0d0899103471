"""When a request has its target draft for itself, and how much. Rounds between real workers: tests/e2e."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from gateway.admission.requests import Demand, FieldNames, check_demand
from gateway.api.schemas.speculation import SpeculationBody
from gateway.generation import GenerationRequest, ServedFacts, SpeculationOptions
from gateway.rounds.decode_loop import Decoder
from gateway.rounds.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.scripted_pool import INFO, connection_of, link_of, served_model
from tests.unit.scripted_workers import ScriptedDraft, ScriptedTarget


def connection(*offered: Drafter) -> Any:
    made = connection_of()
    made.info = pb.WorkerInfo()
    made.info.CopyFrom(INFO)
    made.info.drafters.extend(offered)
    return made


NGRAM = (Drafter.NGRAM, Drafter.LOOKUP)


async def opened(
    target_offers: tuple[Drafter, ...],
    drafter: str,
    prediction: tuple[int, ...] = (),
    named: Drafter | None = None,
    **wish: Any,
) -> tuple[ScriptedTarget, ScriptedDraft]:
    """What a request's target and draft were sent, until the first verdict is waited for."""
    target, draft = ScriptedTarget(info=connection(*target_offers).info), ScriptedDraft()
    config = GatewayConfig.model_validate({"target": "127.0.0.1:9", "drafter": drafter})
    model = served_model({"a": link_of(target)}, {"draft-0": link_of(draft)}, gateway=config)
    speculation = SpeculationOptions(drafter=named, **wish)
    params = SamplingParams(max_tokens=50)
    request = GenerationRequest("r", "m", (1, 2), params, speculation=speculation, prediction_ids=prediction)
    outputs = Decoder(model, Session(request, model.reference.tokenizer, 1), time.monotonic() + 60).run()
    first = asyncio.ensure_future(anext(outputs))
    for _ in range(20):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    return target, draft


@pytest.mark.parametrize(
    ("drafter", "own", "asks_draft"),
    [
        ("model", "", True),
        ("ngram", "ngram", False),
        ("ngram+model", "ngram", True),
        ("lookup|model", "lookup", True),
        ("bigram", "", True),
    ],
)
async def test_the_targets_own_drafter_follows_the_slot_and_a_draft_is_told_where_it_may_draft(
    drafter: str, own: str, asks_draft: bool
) -> None:
    target, draft = await opened(NGRAM, drafter)
    assert target.all_of("open")[0].drafter == own
    assert target.lease.tickets[0].is_drafted is ("advance" in draft.names) is asks_draft


@pytest.mark.parametrize(
    ("default", "named", "own", "asks_draft"),
    [
        ("model", None, "", True),
        ("lookup", None, "lookup", False),
        ("ngram+model", None, "ngram", True),
        ("lookup", Drafter.PREDICTION, "", False),
        ("lookup", Drafter.PREDICTION_MODEL, "", True),
    ],
)
async def test_a_prediction_goes_before_who_else_drafts(
    default: str, named: Drafter | None, own: str, asks_draft: bool
) -> None:
    target, draft = await opened((*NGRAM, Drafter.PREDICTION), default, (3, 4, 5), named)
    message = target.all_of("open")[0]
    assert (list(message.prediction_ids), message.drafter) == ([3, 4, 5], own)
    assert target.lease.tickets[0].is_drafted is ("advance" in draft.names) is asks_draft
    assert all(not each.prediction_ids for each in draft.all_of("open"))


async def test_of_two_that_draft_into_one_tree_the_target_is_told_both() -> None:
    target, draft = await opened((*NGRAM, Drafter.NGRAM_AND_MODEL), "ngram&model")
    assert target.all_of("open")[0].drafter == "ngram&model"
    assert target.lease.tickets[0].is_drafted and "advance" in draft.names


async def test_a_request_without_drafts_has_no_drafter() -> None:
    target, draft = await opened(NGRAM, "ngram", enabled=False)
    assert not target.all_of("open")[0].drafter and not draft.sent


async def test_a_target_without_the_drafter_leaves_it_to_a_model_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        await opened(NGRAM, "bigram")
    assert [record.message for record in caplog.records] == [
        "the target model has no drafter bigram: its requests are drafted for by a model"
    ]


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
    refusal = r"drafter is bigram, .* offered: ngram, unigram; bigram takes .*--target-drafter-text FILE"
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
    model.draft_pools = ()
    assert model.facts().drafters == NGRAM
    model.draft_pools = ("drafts",)  # whose workers are all gone for now
    assert Drafter.NGRAM_MODEL in model.facts().drafters
    assert Drafter.NGRAM_AND_MODEL not in model.facts().drafters  # a target that makes no such trees
    target.info.drafters.append("ngram&model")
    assert Drafter.NGRAM_AND_MODEL in model.facts().drafters
    target.info.trees = True
    assert Drafter.MODEL_AND_MODEL not in model.facts().drafters, "there is one pool of drafts"
    model.draft_pools = ("drafts", "others")
    assert Drafter.MODEL_AND_MODEL in model.facts().drafters


def test_what_a_request_or_a_setting_may_say_is_what_there_is() -> None:
    of_a_body = SpeculationBody.model_json_schema()["properties"]["drafter"]["enum"]
    assert of_a_body == [*Drafter, None]
    of_settings = GatewayConfig.model_json_schema()["properties"]["drafter"]["enum"]
    assert of_settings == [drafter for drafter in Drafter if drafter not in ("prediction", "prediction+model")]
    with pytest.raises(ValueError, match="drafts from what a request predicts; say one of auto, model, ngram"):
        GatewayConfig(target="127.0.0.1:9", drafter=Drafter.PREDICTION)


def test_a_bar_may_stand_for_the_plus() -> None:
    body = SpeculationBody.model_validate({"drafter": "lookup|model"})
    assert body.options().drafter is Drafter.LOOKUP_MODEL
    assert (
        GatewayConfig.model_validate({"target": "127.0.0.1:9", "drafter": "ngram|model"}).drafter is Drafter.NGRAM_MODEL
    )
