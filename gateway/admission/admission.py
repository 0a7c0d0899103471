"""Admits requests of both front ends: finds the caller, checks the queue, and only then tokenises.

A request passes these checks in order, each more expensive than the previous: API key, requests per minute, bytes held,
fields, concurrent choices, queue, tokens per minute. Then it waits for its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from prometheus_client import CollectorRegistry

from gateway.admission.identities import caller_of
from gateway.admission.key_limits import Access, Caller
from gateway.admission.key_ring import KeyRing
from gateway.admission.prompts import ChatSettings, PromptReader
from gateway.admission.request_checks import check_request
from gateway.admission.requests import build_requests, prompt_ids
from gateway.admission.text_threads import TextThreads
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.generation import AdmittedGenerations, Generator, ServedFacts
from gateway.grammar_checker import create_checker
from gateway.telemetry.request_record import RequestRecords, current_record
from outrider.wire.errors import Overloaded, RateLimited
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.otel_metrics import ServerMetrics
from outrider.wire.telemetry.trace import Spans

T = TypeVar("T")

RETRY_S = 1.0
"""Seconds after which a caller may retry a request that was refused because of the limit on bytes of request bodies."""
NUM_LARGEST = 16
"""Limit on the bytes of all request bodies held at one time, in multiples of the largest body that is allowed."""
NUM_SHARES = 4
"""One API key may hold at most 1 / NUM_SHARES of the limit on bytes of request bodies. So clients of one key that send
slowly cannot fill it."""


class BodyBudget:
    """A limit on the bytes of all request bodies that the gateway holds at one time.

    A body counts from its arrival until its request is started or refused. HTTP and gRPC share one budget. All calls
    come from one event loop, so it needs no lock.
    """

    def __init__(self, max_body_bytes: int) -> None:
        """Create a budget of NUM_LARGEST times `max_body_bytes`, the maximal size of one request."""
        self.max_body_bytes = max_body_bytes
        self.max_bytes = NUM_LARGEST * max_body_bytes
        self.num_bytes = 0
        self.num_bytes_of: Counter[str] = Counter()
        """Bytes of request bodies held, by name of the API key. Keys whose requests hold no bytes have no entry."""

    def add(self, key_name: str | None, num_bytes: int) -> None:
        """Add `num_bytes` to the bytes held for an API key.

        Raises Overloaded if all requests together would exceed the limit, RateLimited if the key would exceed its
        share.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"requests of {self.num_bytes} bytes are being read, {num_bytes} more would pass the limit of "
                f"{self.max_bytes}; try again later",
                retry_after_s=RETRY_S,
            )
        max_of_key = self.max_bytes // NUM_SHARES
        num_of_key = self.num_bytes_of[key_name or ""]
        if key_name is not None and num_of_key + num_bytes > max_of_key:
            raise RateLimited(
                f"requests of {num_of_key} bytes of the API key {key_name!r} are being read, {num_bytes} more would "
                f"pass its limit of {max_of_key}; send fewer at once, or faster",
                param="max_body_bytes",
                retry_after_s=RETRY_S,
            )
        self.change(key_name, num_bytes)

    def change(self, key_name: str | None, by: int) -> None:
        """Add `by` bytes, which may be negative, to the bytes held for an API key, without checking any limit."""
        self.num_bytes += by
        if key_name is not None:
            self.num_bytes_of[key_name] += by
            if not self.num_bytes_of[key_name]:
                del self.num_bytes_of[key_name]


class IncomingRequest:
    """A request that is not yet admitted: its caller, and the bytes of its body that count in the `BodyBudget`."""

    def __init__(self, caller: Caller, bodies: BodyBudget) -> None:
        self.caller = caller
        self.max_bytes = bodies.max_body_bytes
        """Maximal size of one request, in bytes."""
        self._bodies = bodies
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Count `num_bytes` more of the request's body as held.

        Raises Overloaded or RateLimited if that would exceed a limit of `BodyBudget`.
        """
        self._bodies.add(self.caller.name, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Count no bytes of the request as held any more. May be called more than once."""
        self._bodies.change(self.caller.name, -self._num_bytes)
        self._num_bytes = 0


class Admission:
    """Admits requests of both front ends, HTTP and gRPC. Raises ConfigError for an unusable file of API keys."""

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
        ring: KeyRing | None = None
        if config.api_keys is not None:
            ring = KeyRing(config.api_keys)
        self.access = Access(ring, registry)
        self.bodies = BodyBudget(config.max_body_bytes)
        self._text_threads = TextThreads()
        self.checker = create_checker(config.max_compile_s)

    def start(self) -> None:
        """Start the grammar processes, so that the first request does not wait for them."""
        self.checker.start()

    async def close(self) -> None:
        """Stop the grammar processes. Nothing may be admitted afterwards."""
        await self.checker.close()

    def incoming(self, authorization: str | None) -> IncomingRequest:
        """Return a new request of the caller with this `authorization` header. The code that gets it must `release` it.

        Raises Unauthenticated for a missing, unknown or expired key.
        """
        caller = self.access.caller(authorization)
        current_record().key = caller.name
        return IncomingRequest(caller, self.bodies)

    async def wait_for_slot(self, answers: AdmittedGenerations) -> None:
        """Wait until the response's stream may begin, that is, until a target has opened the slot of a choice.

        Returns at once if the setting `stream_in_queue` lets streams begin in the queue. Raises the request's error if
        it fails before a slot is opened.
        """
        if not self.config.stream_in_queue:
            await answers.wait_opened()

    def prompt_reader(self, facts: ServedFacts, incoming: IncomingRequest, *, counts: bool = False) -> PromptReader:
        """Return the object that renders and tokenises the texts of this request.

        counts: whether tokens are only counted. A prompt may then have up to COUNTED_CONTEXTS times the context limit.
        """
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
        settings = ChatSettings.from_config(self.config)
        if caller.key is not None and caller.key.control_tokens_in_content == "text":
            return replace(settings, control_tokens="text")
        return settings

    async def prompt_ids(
        self, facts: ServedFacts, incoming: IncomingRequest, unchecked: UncheckedRequest
    ) -> tuple[int, ...]:
        """Return the token ids of the chat that is the request's only prompt, without generating an output."""
        reader = self.prompt_reader(facts, incoming, counts=True)
        return await prompt_ids(unchecked, reader, self.checker, incoming.caller.name)

    @asynccontextmanager
    async def answers(
        self, unchecked: UncheckedRequest, incoming: IncomingRequest
    ) -> AsyncIterator[AdmittedGenerations]:
        """Context manager: admit a request and start its choices. Its value streams their outputs.

        When the block ends, choices that still run or wait are cancelled.

        Raises the error of the first check that fails, before any choice is started: InvalidRequest, ModelNotFound,
        RateLimited, Overloaded, Unavailable.
        """
        caller = incoming.caller
        facts = check_request(unchecked, self.generator.models())
        with caller.count_choices(unchecked.num_all_choices, unchecked.names.num_choices):
            identity = caller_of(caller.name, None)  # without the salt, which a caller may change at will
            async with self.generator.admit(facts.id, unchecked.num_all_choices, identity, caller.weight) as answers:
                reader = self.prompt_reader(facts, incoming)
                requests = await build_requests(
                    unchecked, facts, reader, self.config, self.checker, caller.name, caller.weight
                )
                first_choices = requests[:: unchecked.num_choices]  # one for each prompt
                num_prompt = sum(len(request.caller_prompt_ids) for request in first_choices)
                record = current_record()
                record.model = facts.id
                record.num_prompt_tokens = num_prompt
                num_charged = num_prompt + sum(request.params.max_tokens for request in requests)
                caller.charge(num_charged)
                try:
                    incoming.release()
                    answers.start(requests)
                    yield answers
                finally:
                    caller.settle(num_charged, num_prompt, answers.num_output_tokens)
        record.outcome = "ok"
