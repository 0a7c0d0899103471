"""The way in, for both front ends: who asks, whether the queue takes more, and only then the work of tokenising.

A request passes in this order, each step dearer than the one before: key, requests a minute, bytes being read, fields,
answers at once, queue, tokens a minute, place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from prometheus_client import CollectorRegistry

from gateway.admission.keys import Access, Caller, KeyRing
from gateway.admission.prompts import ChatSettings, PromptReader, TextThreads
from gateway.admission.requests import Demand, build_requests, caller_of, check_demand, prompt_ids
from gateway.generation import AdmittedGenerations, Generator, ServedFacts
from gateway.grammar_checker import create_checker
from gateway.telemetry.request_record import RequestRecords, current_record
from outrider.wire.errors import Overloaded, RateLimited
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.otel_metrics import ServerMetrics
from outrider.wire.telemetry.trace import Spans

T = TypeVar("T")

RETRY_S = 1.0
NUM_LARGEST = 16
"""Requests of the largest size that are held at once; smaller ones many more. Doubled, they take twice the memory."""
NUM_SHARES = 4
"""An API key may hold one of so many equal parts, so that who sends its bodies slowly keeps none of the others out."""


class BodyBudget:
    """Bounds the bytes of requests that are held at once, from their arrival until they are admitted or refused. One
    per gateway, for HTTP and gRPC. One event loop, so no lock.
    """

    def __init__(self, max_body_bytes: int) -> None:
        """max_body_bytes: of one request."""
        self.max_body_bytes = max_body_bytes
        self.max_bytes = NUM_LARGEST * max_body_bytes
        self.num_bytes = 0
        self.num_bytes_of: Counter[str] = Counter()
        """By API key; those that hold none are not in it."""

    def take(self, key_name: str | None, num_bytes: int) -> None:
        """Hold so many more. Raises Overloaded when they are too many for all, RateLimited when for the key alone."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"requests of {self.num_bytes} bytes are being read, {num_bytes} more would pass the limit of "
                f"{self.max_bytes}; try again later",
                retry_after_s=RETRY_S,
            )
        share, own = self.max_bytes // NUM_SHARES, self.num_bytes_of[key_name or ""]
        if key_name is not None and own + num_bytes > share:
            raise RateLimited(
                f"requests of {own} bytes of the API key {key_name!r} are being read, {num_bytes} more would pass its "
                f"limit of {share}; send fewer at once, or faster",
                param="max_body_bytes",
                retry_after_s=RETRY_S,
            )
        self.change(key_name, num_bytes)

    def change(self, key_name: str | None, by: int) -> None:
        """Hold so many more, or fewer, without a question."""
        self.num_bytes += by
        if key_name is not None:
            self.num_bytes_of[key_name] += by
            if not self.num_bytes_of[key_name]:
                del self.num_bytes_of[key_name]


class IncomingRequest:
    """A request on its way in: who sends it, and how many bytes of it are held."""

    def __init__(self, caller: Caller, bodies: BodyBudget) -> None:
        self.caller = caller
        self.max_bytes = bodies.max_body_bytes
        self._bodies = bodies
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Raises Overloaded or RateLimited."""
        self._bodies.take(self.caller.name, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Hold no bytes any more. It may be called again."""
        self._bodies.change(self.caller.name, -self._num_bytes)
        self._num_bytes = 0


class Admission:
    """One per gateway. Raises ConfigError for a file of API keys that cannot be used."""

    def __init__(
        self,
        generator: Generator,
        config: GatewayConfig,
        registry: CollectorRegistry,
        spans: Spans | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self.generator = generator
        self.config = config
        self.registry = registry
        self.records = RequestRecords(spans, metrics)
        self.access = Access(None if config.api_keys is None else KeyRing(config.api_keys), registry)
        self.bodies = BodyBudget(config.max_body_bytes)
        self._text_threads = TextThreads()
        self.checker = create_checker(config.max_compile_s)

    def start(self) -> None:
        """Start the processes that check grammars, which else the first request waits for."""
        self.checker.start()

    async def close(self) -> None:
        """End the processes that check grammars. Nothing is admitted any more."""
        await self.checker.close()

    def incoming(self, authorization: str | None) -> IncomingRequest:
        """Return the request of whoever sends this header. Raises Unauthenticated. Whoever calls it releases it."""
        caller = self.access.caller(authorization)
        current_record().key = caller.name
        return IncomingRequest(caller, self.bodies)

    async def wait_for_slot(self, answers: AdmittedGenerations) -> None:
        """Return when the stream of an answer may begin: once a target has opened its slot, or at once where streams
        begin in the queue. Raises what ends the request before.
        """
        if not self.config.stream_in_queue:
            await answers.opened()

    def prompt_reader(self, facts: ServedFacts, incoming: IncomingRequest, *, counts: bool = False) -> PromptReader:
        """Return what renders and tokenises the texts of this request. counts: see `PromptReader`."""
        return PromptReader(
            self.generator.tokenizer(facts.id),
            facts.context_limit,
            caller_of(incoming.caller.name, None),
            self._text_threads,
            self.config.max_body_bytes,
            self._chat_settings(incoming.caller),
            counts=counts,
        )

    def _chat_settings(self, caller: Caller) -> ChatSettings:
        settings = ChatSettings.of_config(self.config)
        if caller.key is not None and caller.key.control_tokens_in_content == "text":
            return replace(settings, control_tokens="text")
        return settings

    async def prompt_ids(self, facts: ServedFacts, incoming: IncomingRequest, demand: Demand) -> tuple[int, ...]:
        """Return the tokens of a chat that nothing is to be generated for."""
        reader = self.prompt_reader(facts, incoming, counts=True)
        return await prompt_ids(demand, reader, self.checker, incoming.caller.name)

    @asynccontextmanager
    async def answers(self, demand: Demand, incoming: IncomingRequest) -> AsyncIterator[AdmittedGenerations]:
        """Run the answers to a request in this block. Raises whatever speaks against it before anything is started."""
        caller = incoming.caller
        facts = check_demand(demand, self.generator.models())
        with caller.answers(demand.num_answers, demand.names.num_choices):
            identity = caller_of(caller.name, None)  # a salt is what the caller says of itself
            async with self.generator.admit(facts.id, demand.num_answers, identity, caller.weight) as answers:
                reader = self.prompt_reader(facts, incoming)
                requests = await build_requests(
                    demand, facts, reader, self.config, self.checker, caller.name, caller.weight
                )
                num_prompt = sum(len(each.asked_ids) for each in requests[:: demand.num_choices])
                record = current_record()
                record.model, record.num_prompt_tokens = facts.id, num_prompt
                num_charged = num_prompt + sum(each.params.max_tokens for each in requests)
                caller.charge(num_charged)
                try:
                    incoming.release()
                    answers.start(requests)
                    yield answers
                finally:
                    caller.settle(num_charged, num_prompt, answers.num_output_tokens)
        record.outcome = "ok"
