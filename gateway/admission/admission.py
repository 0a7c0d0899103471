"""The way in, for both front ends: who asks, whether there is room, and only then the work of tokenising.

A request passes in this order, each step dearer than the one before: key, requests a minute, bytes being read, fields,
answers at once, room in the queue, tokens, place.

How many bytes of requests are held at once, from their arrival until they are admitted or refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from gateway.admission.keys import Access, Caller, KeyRing
from gateway.admission.requests import Demand, build_requests, check_demand
from gateway.generation import AdmittedGenerations, GenerationRequest, Generator
from gateway.telemetry.request_record import RequestRecords, note_admitted, note_key, note_ok
from outrider.wire.errors import Overloaded, RateLimited
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.trace import Spans

RETRY_S = 1.0
NUM_LARGEST = 16
"""Requests of the largest size that are held at once; smaller ones many more."""
NUM_SHARES = 4
"""An API key may hold one of so many equal parts, so that who sends its bodies slowly keeps none of the others out."""


class BodyBudget:
    """One per gateway, for HTTP and gRPC. One event loop, so no lock."""

    def __init__(self, max_body_bytes: int) -> None:
        """max_body_bytes: of one request."""
        self.max_body_bytes = max_body_bytes
        self.max_bytes = NUM_LARGEST * max_body_bytes
        self.num_bytes = 0
        self.num_bytes_of: Counter[str] = Counter()
        """By API key; those that hold none are not in it."""

    def hold(self, key_name: str | None) -> Held:
        """None: no keys are asked for, so nobody is told from another."""
        return Held(self, key_name)

    def check(self, key_name: str | None, num_bytes: int) -> None:
        """Raises Overloaded when there is no room for so many more."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"requests of {self.num_bytes} bytes are being read, {num_bytes} more would pass the limit of "
                f"{self.max_bytes}; try again later",
                retry_after_s=RETRY_S,
            )
        if key_name is None:
            return
        share, own = self.max_bytes // NUM_SHARES, self.num_bytes_of[key_name]
        if own + num_bytes > share:
            raise RateLimited(
                f"requests of {own} bytes of the API key {key_name!r} are being read, {num_bytes} more would pass its "
                f"limit of {share}; send fewer at once, or faster",
                param="max_body_bytes",
                retry_after_s=RETRY_S,
            )

    def change(self, key_name: str | None, by: int) -> None:
        self.num_bytes += by
        if key_name is not None:
            self.num_bytes_of[key_name] += by
            if not self.num_bytes_of[key_name]:
                del self.num_bytes_of[key_name]


class Held:
    """What one request holds. `release` may be called again."""

    def __init__(self, budget: BodyBudget, key_name: str | None) -> None:
        self.max_bytes = budget.max_body_bytes
        self._budget = budget
        self._key_name = key_name
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        self._budget.check(self._key_name, num_bytes)
        self._budget.change(self._key_name, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._budget.change(self._key_name, -self._num_bytes)
        self._num_bytes = 0


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


class Admission:
    """One per gateway. Raises ConfigError for a file of API keys that cannot be used."""

    def __init__(
        self, generator: Generator, config: GatewayConfig, registry: CollectorRegistry, spans: Spans | None = None
    ) -> None:
        self.generator = generator
        self.config = config
        self.registry = registry
        self.records = RequestRecords(spans)
        self.access = Access(None if config.api_keys is None else KeyRing(config.api_keys), registry)
        self.bodies = BodyBudget(config.max_body_bytes)

    def visit(self, authorization: str | None) -> Visit:
        """Raises Unauthenticated. Whoever calls it releases what the visit holds in the end."""
        caller = self.access.caller(authorization)
        note_key(caller.name)
        return Visit(caller, self.bodies.hold(caller.name))

    @asynccontextmanager
    async def answers(self, demand: Demand, visit: Visit) -> AsyncIterator[Answering]:
        """Raises whatever speaks against the request, before anything is started."""
        caller = visit.caller
        facts = check_demand(demand, self.generator.models())
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
