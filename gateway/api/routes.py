"""The HTTP endpoints.

A generating request takes this way: its body becomes an UncheckedRequest; this is admitted and becomes
GenerationRequests; their outputs become the JSON or the events of the response. `gateway.api.app` adds the routes to
the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.responses import PlainTextResponse, Response

from gateway.admission.admission import Admission, IncomingRequest
from gateway.admission.request_checks import check_request, find_model, requested_model
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.http_io import (
    CLIENT_CLOSED,
    MESSAGES_PING,
    PING,
    EventStream,
    JsonResponse,
    is_anthropic_path,
    while_connected,
)
from gateway.api.layers.layer_answer import LayerAnswer, WriterFactory
from gateway.api.layers.messages_schemas import CountBody, MessagesBody
from gateway.api.layers.messages_writer import MessageWriter
from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.layers.responses_writer import ResponseWriter
from gateway.api.openai_answers import OpenAIAnswer
from gateway.api.openapi import errors, events, named_event_stream
from gateway.api.operations import Operations
from gateway.api.request_body import read_json
from gateway.api.schemas.answers.messages import MessageAnswer, MessageError, MessageEvent, TokenCount
from gateway.api.schemas.answers.openai import ChatChunk, ChatCompletion, Completion
from gateway.api.schemas.answers.responses import InputTokens, ResponseEvent
from gateway.api.schemas.answers.responses import Response as ResponseAnswer
from gateway.api.schemas.answers.server import (
    Alive,
    Detokenized,
    Model,
    ModelList,
    Ready,
    TargetGroup,
    Tokenized,
    TokenizerInfo,
    Version,
)
from gateway.api.schemas.layers import Layer
from gateway.api.schemas.openai import ChatBody, CompletionBody
from gateway.api.schemas.parsing import parse_body
from gateway.api.schemas.vllm import DetokenizeBody, TokenizeBody
from gateway.api.usage import Json
from gateway.generation import ServedFacts
from gateway.tokenizer import Tokenizer
from outrider import __version__
from outrider.wire.requests.params import check_token_ids

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Name of the class in transformers that reads a tokenizer.json. /tokenizer_info reports it for every model."""


class BodyRoute(APIRoute):
    """A route whose JSON body is read by `read_json`, within limits, and then parsed as the type of `body`.

    `body` is the parameter of the endpoint. FastAPI, which would read a body of any size, only documents the route.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        model = get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            incoming: IncomingRequest = request.scope["incoming"]  # made by gateway.api.app.KeyGate
            incoming.caller.count_request()
            models = request.scope["models"]
            body = parse_body(model, await read_json(request, incoming, models), models)
            await asyncio.sleep(0)  # others run now: 4,000 messages took 13 ms to check, and reading them takes 4 ms
            response: Response = await endpoint(request, body)
            return response

        return handle


@dataclass(frozen=True, slots=True)
class Routes:
    """The endpoints of one gateway. The docstring of an endpoint is its description in /openapi.json."""

    admission: Admission
    operations: Operations

    def router(self) -> APIRouter:
        """Return a router with all these endpoints and their documentation."""
        router = APIRouter()
        keys = []
        if self.admission.access.needs_keys:
            keys.append(Security(HTTPBearer(auto_error=False)))
        generation = APIRouter(route_class=BodyRoute, dependencies=keys)
        refusals = errors(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
        for path, endpoint, model, chunk in (
            ("/v1/completions", self.completions, Completion, Completion),
            ("/v1/chat/completions", self.chat, ChatCompletion, ChatChunk),
        ):
            generation.add_api_route(
                path, endpoint, methods=["POST"], response_model=model, responses=refusals, openapi_extra=events(chunk)
            )
        self._add_layers(generation)
        router.include_router(generation)
        get = router.add_api_route
        unauthorized = errors(401, 403)
        get("/v1/models", self.models, response_model=ModelList, responses=unauthorized, dependencies=keys)
        unknown = errors(401, 403, 404)
        get("/v1/models/{model_id:path}", self.model, response_model=Model, responses=unknown, dependencies=keys)
        if self.admission.config.metrics_port is None:
            get("/metrics", self.operations.metrics, response_class=PlainTextResponse)
            get("/sd", self.operations.discovery, response_model=list[TargetGroup])
        get("/health", self.health, response_class=Response, responses={503: {}})
        get("/ping", self.health, methods=["GET", "POST"], include_in_schema=False)
        get("/healthz", self.operations.healthz, response_model=Alive)
        get("/readyz", self.operations.readyz, response_model=Ready, responses={503: {"model": Ready}})
        info = errors(400, 401, 403)
        get("/tokenizer_info", self.tokenizer_info, response_model=TokenizerInfo, responses=info, dependencies=keys)
        get("/version", self.version, response_model=Version)
        get("/openapi.json", self.openapi, response_model=dict[str, Any])
        return router

    def _add_layers(self, router: APIRouter) -> None:
        statuses = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
        refusals = errors(*statuses)
        anthropics = errors(*statuses, model=MessageError)
        for path, endpoint, model, responses, extra in (
            ("/v1/responses", self.responses, ResponseAnswer, refusals, named_event_stream(ResponseEvent)),
            ("/v1/responses/input_tokens", self.input_tokens, InputTokens, refusals, None),
            ("/v1/messages", self.messages, MessageAnswer, anthropics, named_event_stream(MessageEvent)),
            ("/v1/messages/count_tokens", self.count_tokens, TokenCount, anthropics, None),
            ("/tokenize", self.tokenize, Tokenized, refusals, None),
            ("/detokenize", self.detokenize, Detokenized, refusals, None),
        ):
            router.add_api_route(
                path, endpoint, methods=["POST"], response_model=model, responses=responses, openapi_extra=extra
            )

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """Complete prompts, whole or as a stream."""
        return await self._answer(request, body)

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """Answer a chat, whole or as a stream."""
        return await self._answer(request, body)

    async def responses(self, request: Request, body: ResponsesBody) -> Response:
        """Respond in the form of OpenAI's Responses API. Responses are not stored."""
        answer_id = request.scope["answer_id"]
        create_writer = partial(ResponseWriter, body, answer_id)
        return await self._answer_layer(request, body, body.unchecked_request(answer_id), create_writer)

    async def messages(self, request: Request, body: MessagesBody) -> Response:
        """Respond in the form of Anthropic's Messages API."""
        answer_id = request.scope["answer_id"]
        create_writer = partial(MessageWriter, body.max_tokens, answer_id)
        return await self._answer_layer(request, body, body.unchecked_request(answer_id), create_writer)

    async def _answer_layer(
        self, request: Request, body: Layer, unchecked: UncheckedRequest, create_writer: WriterFactory
    ) -> Response:
        token_kinds = body.speculation is not None and body.speculation.has_kinds
        answer = LayerAnswer(self.admission, unchecked, request.scope["incoming"], create_writer, token_kinds)
        if body.stream:
            ping = PING
            if is_anthropic_path(request.url.path):
                ping = MESSAGES_PING
            return EventStream(answer.events, self.admission.config.stream_ping_s, answer.failure, ping)
        whole = await while_connected(request.receive, answer.whole())
        if whole is None:
            return Response(status_code=CLIENT_CLOSED)
        return JsonResponse(whole)

    async def count_tokens(self, request: Request, body: CountBody) -> Response:
        """Count the tokens of a Messages request's prompt, in the form of Anthropic's API."""
        return await self._count(request, body, {})

    async def input_tokens(self, request: Request, body: ResponsesBody) -> Response:
        """Count the tokens of a Responses request's prompt, in the form of OpenAI's API."""
        return await self._count(request, body, {"object": "response.input_tokens"})

    async def _count(self, request: Request, body: CountBody | ResponsesBody, fields: Json) -> Response:
        unchecked = body.unchecked_request(request.scope["answer_id"])
        facts = check_request(unchecked, self.admission.generator.models())
        replace(unchecked.params, max_tokens=facts.context_limit).check(facts.vocab_size)  # as for a generation
        read = partial(self.admission.prompt_ids, facts, request.scope["incoming"], unchecked)
        ids = await self._read_prompt(request, read)
        if ids is None:
            return Response(status_code=CLIENT_CLOSED)
        return JsonResponse({**fields, "input_tokens": len(ids)})

    async def _read_prompt(
        self, request: Request, read: Callable[[], Coroutine[Any, Any, tuple[int, ...]]]
    ) -> tuple[int, ...] | None:
        """Return the token ids that `read` returns; None if the client disconnects first. Meanwhile it counts for the
        API key's limit of concurrent answers.
        """
        incoming: IncomingRequest = request.scope["incoming"]
        with incoming.caller.count_choices(1, "max_concurrent"):
            return await while_connected(request.receive, read())

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """Return the tokens of a text or a chat, in the form of vLLM's API."""
        facts = requested_model(self.admission.generator.models(), body.model or "")
        incoming: IncomingRequest = request.scope["incoming"]
        reader = self.admission.prompt_reader(facts, incoming, counts=True)
        if body.prompt is None:
            unchecked = body.unchecked_request(request.scope["answer_id"])
            check_request(unchecked, [facts])
            read = partial(self.admission.prompt_ids, facts, incoming, unchecked)
        else:
            read = partial(reader.encode, "prompt", body.prompt, body.add_special_tokens is not False)
        ids = await self._read_prompt(request, read)
        if ids is None:
            return Response(status_code=CLIENT_CLOSED)

        def tokenized() -> Response:
            names = None
            if body.return_token_strs:
                names = [reader.tokenizer.token_name(token_id) for token_id in ids]
            sizes = {"count": len(ids), "max_model_len": facts.context_limit}
            return JsonResponse({**sizes, "tokens": ids, "token_strs": names})

        return await reader.work(len(ids), tokenized)

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        """Return the text of tokens, special ones included, in the form of vLLM's API."""
        facts = requested_model(self.admission.generator.models(), body.model or "")
        tokenizer = self._tokenizer_of(facts)

        def detokenized() -> Response:
            check_token_ids("tokens", body.tokens, facts.vocab_size)
            return JsonResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

        incoming: IncomingRequest = request.scope["incoming"]
        with incoming.caller.count_choices(1, "max_concurrent"):
            return await self.admission.prompt_reader(facts, incoming).work(len(body.tokens), detokenized)

    async def tokenizer_info(self) -> Response:
        """Describe the tokenizer, in the form of vLLM's API. Not available if several models are served."""
        tokenizer = self._tokenizer_of(requested_model(self.admission.generator.models(), ""))
        names = {"bos_token": None, "eos_token": None} | tokenizer.special_tokens
        source = None
        if tokenizer.template is not None:
            source = tokenizer.template.source
        return JsonResponse({"tokenizer_class": TOKENIZER_CLASS, **names, "chat_template": source})

    def _tokenizer_of(self, facts: ServedFacts) -> Tokenizer:
        return self.admission.generator.tokenizer(facts.id)

    async def version(self) -> Response:
        """Return the version of Outrider."""
        return JsonResponse({"version": __version__})

    async def _answer(self, request: Request, body: CompletionBody | ChatBody) -> Response:
        unchecked = body.unchecked_request(request.scope["answer_id"])
        answer = OpenAIAnswer(self.admission, body, unchecked, request.scope["incoming"])
        if body.stream:
            return EventStream(answer.events, self.admission.config.stream_ping_s)
        whole = await while_connected(request.receive, answer.whole())
        if whole is None:
            return Response(status_code=CLIENT_CLOSED)
        return whole

    async def models(self) -> Response:
        """List the served models."""
        models = [_model_fields(facts) for facts in self.admission.generator.models()]
        return JsonResponse({"object": "list", "data": models})

    async def model(self, model_id: str) -> Response:
        """Describe one served model."""
        return JsonResponse(_model_fields(find_model(self.admission.generator.models(), model_id)))

    async def health(self) -> Response:
        """Return 200 if a request would be served now, else 503. There is no body."""
        is_ready = self.admission.generator.ready() is None
        return Response(status_code=200 if is_ready else 503)

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI document, which describes these endpoints."""
        return JsonResponse(request.app.openapi())


def _model_fields(facts: ServedFacts) -> Json:
    openais = {"id": facts.id, "object": "model", "created": facts.created, "owned_by": "outrider"}
    sizes = {"max_model_len": facts.context_limit, "vocab_size": facts.vocab_size, "text_only": facts.text_only}
    drafts = {"draft": facts.draft_id, "drafter": facts.default_drafter, "drafters": facts.drafters}
    defaults = {"chat_template": facts.chat_template, "sampling_defaults": dict(facts.sampling_defaults)}
    created_at = datetime.fromtimestamp(facts.created, UTC).isoformat()
    anthropics = {"type": "model", "display_name": facts.id, "created_at": created_at}
    return {**openais, **sizes, **drafts, **defaults, **anthropics}
