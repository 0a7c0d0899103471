"""The HTTP endpoints. A request reads: body -> Demand -> GenerationRequests -> admit -> outputs -> OpenAI's words."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.responses import PlainTextResponse, Response

from gateway.admission.admission import Admission, IncomingRequest
from gateway.admission.requests import Demand, check_demand, find_model, wanted_model
from gateway.api.acceptance import Step, acceptance_of
from gateway.api.forms.layers import Formed, LayerAnswer
from gateway.api.forms.messages_form import MessageForm
from gateway.api.forms.messages_schemas import CountBody, MessagesBody
from gateway.api.forms.responses_form import ResponseForm
from gateway.api.forms.responses_schemas import ResponsesBody
from gateway.api.http_io import (
    CLIENT_CLOSED,
    DONE,
    MESSAGES_PING,
    PING,
    EventStream,
    JsonResponse,
    event,
    is_anthropics,
    read_json,
    while_connected,
)
from gateway.api.logprobs import Prompts
from gateway.api.openai_responses import (
    ChatForm,
    CompletionForm,
    Json,
    joined,
    mean_logprob,
    usage_of,
    usage_so_far,
    with_scores,
)
from gateway.api.openapi import errors, events, named_events
from gateway.api.operations import Operations
from gateway.api.schemas.answers import (
    Alive,
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    InputTokens,
    MessageAnswer,
    MessageError,
    MessageEvent,
    Model,
    ModelList,
    Ready,
    ResponseEvent,
    TargetGroup,
    TokenCount,
    Tokenized,
    TokenizerInfo,
    Version,
)
from gateway.api.schemas.answers import Response as ResponseAnswer
from gateway.api.schemas.layers import Layer
from gateway.api.schemas.openai import ChatBody, CompletionBody, parse_body
from gateway.api.schemas.vllm import DetokenizeBody, TokenizeBody
from gateway.generation import AnswerUsage, GenerationRequest, RoundOutput, ServedFacts
from gateway.tokenizer import Tokenizer
from gateway.workers.draft_limits import asked_speculation
from outrider import __version__
from outrider.wire.requests.params import check_token_ids

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Transformers' class for what a tokenizer.json describes."""
INLINE_ENTRIES = 1000
"""Tokens and log-probs of an answer whose JSON is made on the event loop, in about 5 ms."""


class BodyRoute(APIRoute):
    """A POST of a JSON body that is read in bounds and by orjson; FastAPI, which would read any, documents it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, model = self.endpoint, get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            incoming: IncomingRequest = request.scope["incoming"]  # made by gateway.api.app.Gate
            incoming.caller.take_request()
            models = request.scope["models"]
            body = parse_body(model, await read_json(request, incoming, models), models)
            await asyncio.sleep(0)  # 4,000 messages take 13 ms to check, and 4 ms more to become a demand
            response: Response = await endpoint(request, body)
            return response

        return handle


@dataclass(frozen=True, slots=True)
class Routes:
    admission: Admission
    operations: Operations

    def router(self) -> APIRouter:
        router = APIRouter()
        keys = [Security(HTTPBearer(auto_error=False))] if self.admission.access.asks_for_keys else []
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
        get, listed = router.add_api_route, errors(401, 403)
        get("/v1/models", self.models, response_model=ModelList, responses=listed, dependencies=keys)
        one = errors(401, 403, 404)
        get("/v1/models/{model_id:path}", self.model, response_model=Model, responses=one, dependencies=keys)
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
        """Add the endpoints over chat, and the tokenizer's."""
        statuses = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
        refusals, anthropics = errors(*statuses), errors(*statuses, model=MessageError)
        for path, endpoint, model, responses, told in (
            ("/v1/responses", self.responses, ResponseAnswer, refusals, named_events(ResponseEvent)),
            ("/v1/responses/input_tokens", self.input_tokens, InputTokens, refusals, None),
            ("/v1/messages", self.messages, MessageAnswer, anthropics, named_events(MessageEvent)),
            ("/v1/messages/count_tokens", self.count_tokens, TokenCount, anthropics, None),
            ("/tokenize", self.tokenize, Tokenized, refusals, None),
            ("/detokenize", self.detokenize, Detokenized, refusals, None),
        ):
            router.add_api_route(
                path, endpoint, methods=["POST"], response_model=model, responses=responses, openapi_extra=told
            )

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """Complete prompts, whole or as a stream."""
        return await self._answer(request, body)

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """Answer a chat, whole or as a stream."""
        return await self._answer(request, body)

    async def responses(self, request: Request, body: ResponsesBody) -> Response:
        """Answer as OpenAI's Responses API, without a store."""
        answer_id = request.scope["answer_id"]
        demand = body.demand(answer_id)
        return await self._layer(request, body, demand, partial(ResponseForm, body, answer_id))

    async def messages(self, request: Request, body: MessagesBody) -> Response:
        """Answer as Anthropic's Messages API."""
        answer_id = request.scope["answer_id"]
        formed = partial(MessageForm, body.max_tokens, answer_id)
        return await self._layer(request, body, body.demand(answer_id), formed)

    async def _layer(self, request: Request, body: Layer, demand: Demand, formed: Formed) -> Response:
        token_kinds = body.speculation is not None and body.speculation.has_kinds
        answer = LayerAnswer(self.admission, demand, request.scope["incoming"], formed, token_kinds)
        if body.stream:
            ping = MESSAGES_PING if is_anthropics(request.url.path) else PING
            return EventStream(answer.events, self.admission.config.stream_ping_s, answer.failure, ping)
        whole = await while_connected(request.receive, answer.whole())
        return Response(status_code=CLIENT_CLOSED) if whole is None else JsonResponse(whole)

    async def count_tokens(self, request: Request, body: CountBody) -> Response:
        """Count the tokens of a message's input, as Anthropic's API."""
        return await self._count(request, body, {})

    async def input_tokens(self, request: Request, body: ResponsesBody) -> Response:
        """Count the tokens of a response's input, as OpenAI's API."""
        return await self._count(request, body, {"object": "response.input_tokens"})

    async def _count(self, request: Request, body: CountBody | ResponsesBody, fields: Json) -> Response:
        demand, incoming = body.demand(request.scope["answer_id"]), request.scope["incoming"]
        facts = check_demand(demand, self.admission.generator.models())
        replace(demand.params, max_tokens=facts.context_limit).check(facts.vocab_size)  # as where one is answered
        ids = await self._while_connected(request, partial(self.admission.prompt_ids, facts, incoming, demand))
        if ids is None:
            return Response(status_code=CLIENT_CLOSED)
        return JsonResponse({**fields, "input_tokens": len(ids)})

    async def _while_connected(
        self, request: Request, read: Callable[[], Coroutine[Any, Any, tuple[int, ...]]]
    ) -> tuple[int, ...] | None:
        """Return the tokens, None when the client left first. It counts as one of the key's answers at once."""
        incoming: IncomingRequest = request.scope["incoming"]
        with incoming.caller.answers(1, "max_concurrent"):
            return await while_connected(request.receive, read())

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """Return the tokens of a text or a chat, as vLLM."""
        facts = wanted_model(self.admission.generator.models(), body.model or "")
        incoming: IncomingRequest = request.scope["incoming"]
        reader = self.admission.prompt_reader(facts, incoming, counts=True)
        if body.prompt is None:
            demand = body.demand(request.scope["answer_id"])
            check_demand(demand, [facts])
            read = partial(self.admission.prompt_ids, facts, incoming, demand)
        else:
            read = partial(reader.encode, "prompt", body.prompt, body.add_special_tokens is not False)
        ids = await self._while_connected(request, read)
        if ids is None:
            return Response(status_code=CLIENT_CLOSED)

        def tokenized() -> Response:
            names = [reader.tokenizer.token_name(each) for each in ids] if body.return_token_strs else None
            sizes = {"count": len(ids), "max_model_len": facts.context_limit}
            return JsonResponse({**sizes, "tokens": ids, "token_strs": names})

        return await reader.work(len(ids), tokenized)

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        """Return the text of tokens, special ones included, as vLLM."""
        facts = wanted_model(self.admission.generator.models(), body.model or "")
        tokenizer = self._tokenizer_of(facts)

        def detokenized() -> Response:
            check_token_ids("tokens", body.tokens, facts.vocab_size)
            return JsonResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

        incoming: IncomingRequest = request.scope["incoming"]
        with incoming.caller.answers(1, "max_concurrent"):
            return await self.admission.prompt_reader(facts, incoming).work(len(body.tokens), detokenized)

    async def tokenizer_info(self) -> Response:
        """Describe the tokenizer, as vLLM; of several models none."""
        tokenizer = self._tokenizer_of(wanted_model(self.admission.generator.models(), ""))
        names = {"bos_token": None, "eos_token": None} | tokenizer.special_tokens
        source = None if tokenizer.template is None else tokenizer.template.source
        return JsonResponse({"tokenizer_class": TOKENIZER_CLASS, **names, "chat_template": source})

    def _tokenizer_of(self, facts: ServedFacts) -> Tokenizer:
        return self.admission.generator.tokenizer(facts.id)

    async def version(self) -> Response:
        """Return Outrider's own."""
        return JsonResponse({"version": __version__})

    async def _answer(self, request: Request, body: CompletionBody | ChatBody) -> Response:
        demand = body.demand(request.scope["answer_id"])
        if body.stream:
            streamed = partial(self._events, body, demand, request.scope["incoming"])
            return EventStream(streamed, self.admission.config.stream_ping_s)
        whole = await while_connected(request.receive, self._whole(body, demand, request.scope["incoming"]))
        return Response(status_code=CLIENT_CLOSED) if whole is None else whole

    async def _whole(self, body: CompletionBody | ChatBody, demand: Demand, incoming: IncomingRequest) -> Response:
        async with self.admission.answers(demand, incoming) as answers:
            form = await self._form(body, demand, answers.requests)
            rounds: list[list[RoundOutput]] = [[] for _ in answers.requests]
            async for index, output in answers.stream():
                rounds[index].append(output)
        num_logprobs = 1 + (demand.params.num_logprobs or 0)
        num_entries = num_logprobs * sum(len(output.tokens) for each in rounds for output in each)
        if body.return_token_ids:
            num_entries += sum(len(request.asked_ids) for request in answers.requests)
        if demand.num_prompt_logprobs is None and num_entries <= INLINE_ENTRIES:
            return self._spelt(body, demand, answers.requests, form, rounds)
        # There may be hundreds of thousands: nobody else waits for their JSON.
        return await asyncio.to_thread(self._spelt, body, demand, answers.requests, form, rounds)

    def _spelt(
        self,
        body: CompletionBody | ChatBody,
        demand: Demand,
        requests: tuple[GenerationRequest, ...],
        form: CompletionForm | ChatForm,
        rounds: Sequence[Sequence[RoundOutput]],
    ) -> Response:
        """Return the whole answer. rounds: of each choice."""
        head = _head(demand, requests, form.object)
        outputs = with_scores([joined(each) for each in rounds], demand.num_choices)
        usages = [output.usage for output in outputs if output.usage is not None]
        kept: Sequence[int] = range(len(outputs))
        if isinstance(body, CompletionBody):
            kept = best_of(outputs, demand.num_choices, body.n or 1)
        choices = [form.choice(index, outputs[index]) | {"index": place} for place, index in enumerate(kept)]
        head |= form.beside(0, outputs[0])
        usage = usage_of(usages, demand.num_choices, form.num_reasoning_tokens)
        steps = [(output.num_drafted, output.num_accepted) for output in rounds[0]]
        metrics = self._metrics(body, requests, steps)
        return JsonResponse({**head, "choices": choices, "usage": usage, "metrics": metrics})

    async def _events(
        self, body: CompletionBody | ChatBody, demand: Demand, incoming: IncomingRequest
    ) -> AsyncGenerator[bytes]:
        """One event per round and choice; rounds that only held text back send none, unless kinds are asked for."""
        usages: dict[int, AnswerUsage] = {}
        steps: list[Step] = []
        num_tokens: Counter[int] = Counter()
        seen: set[int] = set()
        async with self.admission.answers(demand, incoming) as answers:
            form = await self._form(body, demand, answers.requests)
            head = _head(demand, answers.requests, form.chunk_object)
            if body.include_usage:
                head["usage"] = None
            await self.admission.wait_for_slot(answers)
            yield b""  # the status
            async for index, output in answers.stream():
                first = index not in seen
                seen.add(index)
                steps.append((output.num_drafted, output.num_accepted))
                num_tokens[index] += len(output.tokens)
                if output.usage is not None:
                    usages[index] = output.usage
                if output.prompt_logprobs is None:
                    chunk = form.chunk(index, output, first)
                else:
                    chunk = await asyncio.to_thread(form.chunk, index, output, first)
                if chunk is not None:
                    if body.continuous_usage:
                        head["usage"] = usage_so_far(len(answers.requests[index].asked_ids), num_tokens[index])
                    beside = form.beside(index, output) if first else {}
                    yield event({**head, **beside, "choices": [chunk]})
        if body.include_usage:
            told = [usages[index] for index in sorted(usages)]
            usage = usage_of(told, demand.num_choices, form.num_reasoning_tokens)
            metrics = self._metrics(body, answers.requests, steps)
            yield event({**head, "choices": [], "usage": usage, "metrics": metrics})
        yield DONE

    def _metrics(
        self, body: CompletionBody | ChatBody, requests: tuple[GenerationRequest, ...], steps: list[Step]
    ) -> Json:
        """Return vLLM's `metrics`. It says nothing of several answers: rounds would be of one of them or of all."""
        first, acceptance = requests[0], None
        num_spec_tokens = asked_speculation(first, self.admission.config).max_depth
        if len(requests) == 1 and first.params.beams is None and num_spec_tokens:
            drafted = [step for step in steps if step[0]]
            acceptance = acceptance_of(drafted, num_spec_tokens, body.detailed_metrics)
        return {"speculative_decoding": acceptance}

    async def _form(
        self, body: CompletionBody | ChatBody, demand: Demand, requests: tuple[GenerationRequest, ...]
    ) -> CompletionForm | ChatForm:
        tokenizer = self.admission.generator.tokenizer(requests[0].model)
        if isinstance(body, ChatBody):
            readings = [each.reading for each in requests]
            prompts = _prompts(body, tokenizer, requests)
            return ChatForm(tokenizer, bool(body.logprobs), readings, body.token_kinds, prompts)
        echoes: list[str] = []
        if body.echo:
            skips = body.skip_special_tokens is not False
            prompts_ids = [request.asked_ids for request in requests[:: demand.num_choices]]
            texts = await asyncio.to_thread(lambda: [tokenizer.decode(ids, skips) for ids in prompts_ids])
            echoes = [text for text in texts for _ in range(demand.num_choices)]
        prompts = _prompts(body, tokenizer, requests)
        return CompletionForm(tokenizer, body.logprobs is not None, echoes, body.token_kinds, prompts)

    async def models(self) -> Response:
        """List the served models."""
        return JsonResponse({"object": "list", "data": [_model(facts) for facts in self.admission.generator.models()]})

    async def model(self, model_id: str) -> Response:
        """Describe one of them."""
        return JsonResponse(_model(find_model(self.admission.generator.models(), model_id)))

    async def health(self) -> Response:
        """Answer as vLLM: no body, 200 while a request would be served and 503 while not."""
        return Response(status_code=200 if self.admission.generator.ready() is None else 503)

    async def openapi(self, request: Request) -> Response:
        """Return this document."""
        return JsonResponse(request.app.openapi())


def best_of(outputs: Sequence[RoundOutput], num_made: int, num_wanted: int) -> list[int]:
    """Return the indices of those of the highest log-prob a token, num_wanted of each num_made, best first."""
    if num_wanted == num_made:
        return list(range(len(outputs)))
    kept: list[int] = []
    for first in range(0, len(outputs), num_made):
        made = range(first, first + num_made)
        kept += sorted(made, key=lambda index: mean_logprob(outputs[index]), reverse=True)[:num_wanted]
    return kept


def _prompts(
    body: CompletionBody | ChatBody, tokenizer: Tokenizer, requests: tuple[GenerationRequest, ...]
) -> Prompts | None:
    """Return what is told of the prompts besides; None where nothing is asked for."""
    num_echoed = body.num_echoed if isinstance(body, CompletionBody) else None
    if not body.return_token_ids and body.prompt_logprobs is None and num_echoed is None:
        return None
    return Prompts(tokenizer, requests, bool(body.return_token_ids), body.prompt_logprobs, num_echoed)


def _head(demand: Demand, requests: tuple[GenerationRequest, ...], kind: str) -> Json:
    facts = {"created": int(time.time()), "model": requests[0].model, "system_fingerprint": None}
    return {"id": demand.request_id, "object": kind, **facts}


def _model(facts: ServedFacts) -> Json:
    sizes = {"max_model_len": facts.context_limit, "vocab_size": facts.vocab_size, "text_only": facts.text_only}
    drafts = {
        "draft": facts.draft_id,
        "drafter": facts.default_drafter,
        "drafters": facts.drafters,
        "chat_template": facts.chat_template,
    }
    created_at = datetime.fromtimestamp(facts.created, UTC).isoformat()
    anthropics = {"type": "model", "display_name": facts.id, "created_at": created_at}
    defaults = {"sampling_defaults": dict(facts.sampling_defaults)}
    openais = {"id": facts.id, "object": "model", "created": facts.created, "owned_by": "outrider"}
    return {**openais, **sizes, **drafts, **defaults, **anthropics}
