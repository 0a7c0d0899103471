"""Served models with drafts of several kinds, for the tests of who drafts."""

from typing import Any

from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.drafters import Drafter
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of, served_model


def draft_link(*drafters: Drafter, **changes: Any) -> Any:
    info = pb.WorkerInfo()
    info.CopyFrom(INFO)
    info.drafters.extend(drafters)
    info.model_id = drafters[0] if drafters else "small"
    link = link_of(connection_of(), info)
    link.connection.info = info
    return link


def mixed(**settings: Any) -> ServedModel:
    drafts = {"guesses": draft_link(Drafter.NGRAM), "pairs": draft_link(Drafter.BIGRAM), "small": draft_link()}
    config = GatewayConfig(target="127.0.0.1:9", **settings)
    return served_model({"a": link_of(connection_of())}, drafts, gateway=config)


def given(model: ServedModel, drafter: Drafter, *, searches: bool = False) -> str | None:
    draft = model.choose_draft(model.targets["a"], drafter=drafter, searches=searches)
    return None if draft is None else draft.name


def lost(model: ServedModel, *names: str) -> None:
    for name in names:
        link: Any = model.drafts[name].link
        link.connection = None
