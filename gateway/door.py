"""The way in, for both front ends: who asks, whether there is room, and only then the work of tokenising.

A request passes in this order, each step dearer than the one before: key, requests a minute, bytes being read, fields,
answers at once, room in the queue, tokens, place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from gateway.access import Access, Caller
from gateway.body_budget import NUM_LARGEST, BodyBudget, Held
from gateway.generation import AdmittedGenerations, GenerationRequest, Generator
from gateway.key_ring import KeyRing
from gateway.request_record import RequestRecords, note_admitted, note_key, note_ok
from gateway.requests import Demand, build_requests, check_demand
from outrider.wire.config import GatewayConfig
from outrider.wire.trace import Spans


@dataclass(frozen=True, slots=True)
class Visit:
    """One request on its way in."""

    caller: Caller
    held: Held


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers in progress, and the requests they are to."""

    requests: tuple[GenerationRequest, ...]
    outputs: AdmittedGenerations


class Door:
    """One per gateway. Raises ConfigError for a file of API keys that cannot be used."""

    def __init__(
        self, generator: Generator, config: GatewayConfig, registry: CollectorRegistry, spans: Spans | None = None
    ) -> None:
        self.generator = generator
        self.config = config
        self.registry = registry
        self.records = RequestRecords(spans)
        self.access = Access(None if config.api_keys is None else KeyRing(config.api_keys), registry)
        self.bodies = BodyBudget(NUM_LARGEST * config.max_body_bytes)

    def visit(self, authorization: str | None) -> Visit:
        """Raises Unauthenticated. Whoever calls it releases what the visit holds in the end."""
        caller = self.access.caller(authorization)
        note_key(caller.name)
        return Visit(caller, self.bodies.hold(caller.name))

    @asynccontextmanager
    async def answers(self, demand: Demand, visit: Visit) -> AsyncIterator[Answering]:
        """Raises whatever speaks against the request, before anything is started."""
        caller = visit.caller
        facts = check_demand(demand, self.generator.models(), self.config)
        with caller.answers(demand.num_answers, demand.names.num_choices):
            self.generator.check_room(facts.id, demand.num_answers)
            requests = await build_requests(demand, facts, self.generator.tokenizer(facts.id), self.config, caller.name)
            note_admitted(requests)
            num_prompt = sum(len(each.prompt_ids) for each in requests[:: demand.num_choices])
            num_output = sum(each.params.max_tokens for each in requests)
            with caller.charged(num_prompt, num_output) as charge:
                async with self.generator.admit(requests) as outputs:
                    visit.held.release()
                    try:
                        yield Answering(requests, outputs)
                    finally:
                        charge.num_used = num_prompt + outputs.num_output_tokens
        note_ok()
