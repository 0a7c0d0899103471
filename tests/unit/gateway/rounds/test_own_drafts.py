"""When a request has its target draft for itself, and how much. Rounds between real workers: tests/e2e."""

import asyncio
import time
from typing import Any

import pytest

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.rounds.decode_loop import Decoder
from gateway.rounds.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of, served_model
from tests.unit.gateway.scripted_workers import ScriptedDraft, ScriptedTarget


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
async def test_the_targets_own_drafter_follows_the_slot(drafter: str, own: str, asks_draft: bool) -> None:
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


def test_requests_may_name_what_workers_report() -> None:
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
    target.info.supports_trees = True
    assert Drafter.MODEL_AND_MODEL not in model.facts().drafters, "there is one pool of drafts"
    model.draft_pools = ("drafts", "others")
    assert Drafter.MODEL_AND_MODEL in model.facts().drafters
