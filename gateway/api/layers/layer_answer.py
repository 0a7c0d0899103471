"""Serves a layer over chat: one output of one chat, as a whole response or as events of the layer's protocol.

`gateway.api.routes` creates a LayerAnswer for each request. It passes every output to an AnswerWriter, which writes it
in the protocol of Responses or Messages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Protocol

import orjson

from gateway.admission.admission import Admission, IncomingRequest
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.openai_responses import ChoiceReader, Json, join_outputs
from gateway.api.speculation_answers import speculation_of
from gateway.api.usage import usage_of
from gateway.generation import GenerationRequest, RoundOutput
from gateway.tokenizer import Tokenizer
from gateway.tools.parts import CallRetraction, CallStart, Part
from gateway.tools.reading import Reading
from outrider.wire.errors import OutriderError

PLAIN_TEXT = Reading(family=None, schemas={}, reasoning=None, in_reasoning=False, max_calls=None, shown_ids=frozenset())
"""Reading for an output that is all text: neither tool calls nor reasoning are looked for in it."""


class AnswerWriter(Protocol):
    """Interface: writes one response of /v1/responses or /v1/messages, in the protocol of that API.

    Every output of the choice must be passed to `push`, in order. An event is a dict with a `type`, which names the
    event.
    """

    def begin(self) -> Iterator[Json]:
        """Yield the events with which a stream begins, before any output."""

    def push(self, output: RoundOutput) -> Iterator[Json]:
        """Yield the events for the output of one round."""

    def without_text(self) -> Json:
        """Return an event that adds no text to the response.

        If `push` yields no event for a round, the round's field `speculation` is sent with this event.
        """

    def failed(self, error: OutriderError) -> Iterator[Json]:
        """Yield the events that end a stream which has begun and cannot go on because of `error`."""

    def whole(self) -> Json:
        """Return the JSON of the whole response, made of all outputs that were passed to `push`."""


WriterFactory = Callable[[GenerationRequest, Tokenizer], AnswerWriter]
"""Function that creates the AnswerWriter of one response, given the GenerationRequest and the tokenizer of the
request's model."""


class AnswerReader:
    """Splits the outputs of one choice into parts: text, reasoning and tool calls."""

    def __init__(self, reading: Reading | None) -> None:
        self._reader = ChoiceReader(reading or PLAIN_TEXT)

    def parts(self, output: RoundOutput) -> list[Part]:
        """Return the parts in the output of one round.

        A tool call that began in this round, and turned out in this round to be text, is left out.
        """
        parts: list[Part] = []
        begun: int | None = None  # index in `parts` of a call that began in this round
        for part in self._reader.read(output):
            if isinstance(part, CallRetraction) and begun is not None:
                del parts[begun:]
                begun = None
                continue
            if isinstance(part, CallStart):
                begun = len(parts)
            parts.append(part)
        return parts

    def call_id(self, call: CallStart) -> str:
        """Return a new id for a tool call, in the form that the chat template accepts."""
        return self._reader.call_id(call.index, call.name)

    @property
    def has_calls(self) -> bool:
        """Whether the outputs so far contain a complete tool call."""
        return self._reader.has_calls

    def usage(self, output: RoundOutput) -> Json:
        """Return the choice's usage as the field `usage` of /v1/chat/completions writes it.

        output: last output of the choice, the only one that has the choice's usage.
        """
        assert output.usage is not None
        return usage_of([output.usage], 1, self._reader.num_reasoning_tokens)


class LayerAnswer:
    """Runs one request of Responses or Messages, the APIs that the gateway converts to chats.

    Await `whole` for a response in one piece, or iterate over `events` for a stream.
    """

    def __init__(
        self,
        admission: Admission,
        unchecked: UncheckedRequest,
        incoming: IncomingRequest,
        create_writer: WriterFactory,
        token_kinds: bool,
    ) -> None:
        """Create the response of one request, not yet started.

        create_writer: creates the AnswerWriter that writes it. token_kinds: whether the response contains the kind of
        each output token, in the field `speculation`.
        """
        self._admission = admission
        self._unchecked = unchecked
        self._incoming = incoming
        self._writer_factory = create_writer
        self._token_kinds = token_kinds
        self._writer: AnswerWriter | None = None

    async def whole(self) -> Json:
        """Run the request to its end, and return the whole response."""
        outputs: list[RoundOutput] = []
        async with self._admission.answers(self._unchecked, self._incoming) as answers:
            writer = self._create_writer(answers.requests[0])
            async for _, output in answers.stream():
                if self._token_kinds:
                    outputs.append(output)
                for _ in writer.push(output):
                    pass  # the events themselves are not needed
        whole = writer.whole()
        if outputs:
            whole |= self._speculation(join_outputs(outputs), answers.requests[0])
        return whole

    async def events(self) -> AsyncGenerator[bytes]:
        """Run the request, and yield server-sent events in bytes.

        The first item has the events with which the stream begins. Each further item has all events of one round.
        """
        async with self._admission.answers(self._unchecked, self._incoming) as answers:
            writer = self._create_writer(answers.requests[0])
            await self._admission.wait_for_slot(answers)
            yield encode_events(writer.begin())
            async for _, output in answers.stream():
                events = list(writer.push(output))
                if self._token_kinds:
                    events = events or [writer.without_text()]
                    events[0] |= self._speculation(output, answers.requests[0])
                if events:
                    yield encode_events(events)

    def failure(self, error: OutriderError) -> bytes:
        """Return the server-sent events that end a stream which has begun and cannot go on because of `error`."""
        assert self._writer is not None
        return encode_events(self._writer.failed(error))

    def _speculation(self, output: RoundOutput, request: GenerationRequest) -> Json:
        return {"speculation": speculation_of(output, self._admission.generator.tokenizer(request.model))}

    def _create_writer(self, request: GenerationRequest) -> AnswerWriter:
        self._writer = self._writer_factory(request, self._admission.generator.tokenizer(request.model))
        return self._writer


def encode_events(events: Iterable[Json]) -> bytes:
    """Return events as server-sent events in bytes, each with its `type` as the name."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
