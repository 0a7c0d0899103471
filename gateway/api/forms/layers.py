"""Serves a layer over chat: one answer to one chat, whole or as the events of the layer's own protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Protocol

import orjson

from gateway.admission.admission import Admission, IncomingRequest
from gateway.admission.requests import Demand
from gateway.api.openai_responses import Json, ReadText, joined, usage_of
from gateway.api.speculation_answers import speculation_of
from gateway.generation import GenerationRequest, RoundOutput
from gateway.tokenizer import Tokenizer
from gateway.tools.reader import CallBegun, CallUnread, Part
from gateway.tools.reading import Reading
from outrider.wire.errors import OutriderError

AS_IT_STANDS = Reading(
    family=None, names=frozenset(), marks=None, in_reasoning=False, max_calls=None, shown_ids=frozenset()
)
"""There are neither calls nor reasoning."""


class Form(Protocol):
    """Spells one answer. Give it all outputs, in order; every event is a dict with a `type`."""

    def begin(self) -> Iterator[Json]:
        """Yield what a stream begins with."""

    def push(self, output: RoundOutput) -> Iterator[Json]:
        """Yield the events of one round."""

    def without_text(self) -> Json:
        """Return an event that a client takes for no part of the answer, for a round that has no other."""

    def failed(self, error: OutriderError) -> Iterator[Json]:
        """Yield what ends a stream that has begun and cannot go on."""

    def whole(self) -> Json:
        """Return the answer as far as it has come."""


Formed = Callable[[GenerationRequest, Tokenizer], Form]
"""Makes the form of one answer."""


class ReadAnswer:
    """One answer's text as parts."""

    def __init__(self, reading: Reading | None) -> None:
        self._text = ReadText(reading or AS_IT_STANDS)

    def parts(self, output: RoundOutput) -> list[Part]:
        """Return them, but for a call that has begun in this round and turned out to be none."""
        parts: list[Part] = []
        begun: int | None = None
        for part in self._text.read(output):
            if isinstance(part, CallUnread) and begun is not None:
                del parts[begun:]
                begun = None
                continue
            if isinstance(part, CallBegun):
                begun = len(parts)
            parts.append(part)
        return parts

    def call_id(self) -> str:
        return self._text.call_id()

    @property
    def has_calls(self) -> bool:
        return self._text.has_calls

    def usage(self, output: RoundOutput) -> Json:
        """Return chat's usage object of the last output."""
        assert output.usage is not None
        return usage_of([output.usage], 1, self._text.num_reasoning_tokens)


class LayerAnswer:
    """One request on its way through. `token_kinds`: the answer says what its tokens are, as chat's choices do."""

    def __init__(
        self, admission: Admission, demand: Demand, incoming: IncomingRequest, formed: Formed, token_kinds: bool
    ) -> None:
        self._admission = admission
        self._demand = demand
        self._incoming = incoming
        self._formed = formed
        self._token_kinds = token_kinds
        self._form: Form | None = None

    async def whole(self) -> Json:
        """Return what the events of a stream add up to."""
        outputs: list[RoundOutput] = []
        async with self._admission.answers(self._demand, self._incoming) as answers:
            form = self._begun(answers.requests[0])
            async for _, output in answers.stream():
                if self._token_kinds:
                    outputs.append(output)
                for _ in form.push(output):
                    pass
        whole = form.whole()
        if outputs:
            whole |= self._speculation(joined(outputs), answers.requests[0])
        return whole

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events, those of one round together."""
        async with self._admission.answers(self._demand, self._incoming) as answers:
            form = self._begun(answers.requests[0])
            await self._admission.wait_for_slot(answers)
            yield sent(form.begin())
            async for _, output in answers.stream():
                events = list(form.push(output))
                if self._token_kinds:
                    events = events or [form.without_text()]
                    events[0] |= self._speculation(output, answers.requests[0])
                if events:
                    yield sent(events)

    def failure(self, error: OutriderError) -> bytes:
        """Return the events that end a stream which has begun."""
        assert self._form is not None
        return sent(self._form.failed(error))

    def _speculation(self, output: RoundOutput, request: GenerationRequest) -> Json:
        return {"speculation": speculation_of(output, self._admission.generator.tokenizer(request.model))}

    def _begun(self, request: GenerationRequest) -> Form:
        self._form = self._formed(request, self._admission.generator.tokenizer(request.model))
        return self._form


def sent(events: Iterable[Json]) -> bytes:
    """Return named server-sent events."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (each["type"].encode(), orjson.dumps(each)) for each in events)
