"""The HTTP endpoints. A request reads: body -> Demand -> GenerationRequests -> admit -> outputs -> OpenAI's words."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from gateway.discovery import target_groups
from gateway.door import Door, Visit
from gateway.generation import GenerationRequest, ModelFacts, Usage
from gateway.http_io import CLIENT_CLOSED, DONE, EventStream, JsonResponse, event, read_json, while_connected
from gateway.member import Member
from gateway.openai_responses import Answer, ChatForm, CompletionForm, Form, Json, usage_of
from gateway.openapi import openapi_json
from gateway.requests import Demand, find_model
from gateway.schemas import ChatBody, CompletionBody, parse_body

MakeForm = Callable[[tuple[GenerationRequest, ...]], Form]


@dataclass(frozen=True, slots=True)
class Routes:
    door: Door
    members: Callable[[], Iterable[Member]]
    """The workers, for /sd."""

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/completions", self.completions, methods=["POST"], response_model=None)
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        for path, endpoint in (
            ("/v1/models", self.models),
            ("/v1/models/{model_id:path}", self.model),
            ("/metrics", self.metrics),
            ("/sd", self.discovery),
            ("/healthz", self.healthz),
            ("/readyz", self.readyz),
            ("/openapi.json", self.openapi),
        ):
            router.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        return router

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await self._read(request))
        demand = body.demand(request.scope["answer_id"])

        def form(requests: tuple[GenerationRequest, ...]) -> Form:
            tokenizer = self.door.generator.tokenizer(requests[0].model)
            echoes = [tokenizer.decode(each.prompt_ids) for each in requests] if body.echo else ()
            return CompletionForm(tokenizer, body.logprobs is not None, echoes)

        return await self._answer(request, demand, form, bool(body.stream), body.include_usage())

    async def chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await self._read(request))
        demand = body.demand(request.scope["answer_id"])

        def form(requests: tuple[GenerationRequest, ...]) -> Form:
            return ChatForm(self.door.generator.tokenizer(requests[0].model), bool(body.logprobs))

        return await self._answer(request, demand, form, bool(body.stream), body.include_usage())

    async def _read(self, request: Request) -> Json:
        _visit(request).caller.take_request()
        return await read_json(request, self.door.config.max_body_bytes, _visit(request).held)

    async def _answer(
        self, request: Request, demand: Demand, make_form: MakeForm, stream: bool, include_usage: bool
    ) -> Response:
        visit = _visit(request)
        if stream:
            return EventStream(lambda: self._events(demand, visit, make_form, include_usage))
        whole = await while_connected(request.receive, self._whole(demand, visit, make_form))
        return Response(status_code=CLIENT_CLOSED) if whole is None else JsonResponse(whole)

    async def _whole(self, demand: Demand, visit: Visit, make_form: MakeForm) -> Json:
        async with self.door.answers(demand, visit) as answering:
            requests = answering.requests
            form = make_form(requests)
            answers = [Answer() for _ in requests]
            async for index, output in answering.outputs.stream():
                answers[index].add(output)
        choices = [form.choice(index, answer) for index, answer in enumerate(answers)]
        usages = {index: answer.usage for index, answer in enumerate(answers) if answer.usage is not None}
        head = _head(demand, requests, form.object)
        return {**head, "choices": choices, "usage": usage_of(_by_prompt(usages, demand))}

    async def _events(
        self, demand: Demand, visit: Visit, make_form: MakeForm, include_usage: bool
    ) -> AsyncGenerator[bytes]:
        """One event per round and choice; rounds that only held text back send none."""
        usages: dict[int, Usage] = {}
        seen: set[int] = set()
        async with self.door.answers(demand, visit) as answering:
            form = make_form(answering.requests)
            head = _head(demand, answering.requests, form.chunk_object) | ({"usage": None} if include_usage else {})
            async for index, output in answering.outputs.stream():
                first = index not in seen
                seen.add(index)
                if output.usage is not None:
                    usages[index] = output.usage
                if first or output.text_delta or output.finish_reason or demand.params.num_logprobs is not None:
                    yield event({**head, "choices": [form.chunk(index, output, first)]})
        if include_usage:
            yield event({**head, "choices": [], "usage": usage_of(_by_prompt(usages, demand))})
        yield DONE

    async def models(self) -> Response:
        return JsonResponse({"object": "list", "data": [_model(facts) for facts in self.door.generator.models()]})

    async def model(self, model_id: str) -> Response:
        return JsonResponse(_model(find_model(self.door.generator.models(), model_id)))

    async def metrics(self) -> Response:
        return Response(generate_latest(self.door.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def discovery(self) -> Response:
        """The workers' metrics endpoints, for Prometheus' http_sd_configs."""
        return JsonResponse(target_groups(self.members()))

    async def healthz(self) -> Response:
        """The process lives."""
        return JsonResponse({"alive": True})

    async def readyz(self) -> Response:
        """A request would be served now."""
        reason = self.door.generator.ready()
        return JsonResponse({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    async def openapi(self) -> Response:
        return Response(openapi_json(self.door.access.asks_for_keys), media_type="application/json")


def _visit(request: Request) -> Visit:
    """Made by `gateway.app.Gate`."""
    visit: Visit = request.scope["visit"]
    return visit


def _head(demand: Demand, requests: tuple[GenerationRequest, ...], kind: str) -> Json:
    facts = {"created": int(time.time()), "model": requests[0].model, "system_fingerprint": None}
    return {"id": demand.request_id, "object": kind, **facts}


def _by_prompt(usages: dict[int, Usage], demand: Demand) -> list[list[Usage]]:
    """[num_prompts][num_choices], all answers having ended."""
    count = demand.num_choices
    return [[usages[p * count + choice] for choice in range(count)] for p in range(len(demand.prompts))]


def _model(facts: ModelFacts) -> Json:
    sizes = {"max_model_len": facts.context_limit, "vocab_size": facts.vocab_size}
    drafts = {"draft": facts.draft_id, "drafters": [drafter.label for drafter in facts.drafters]}
    return {"id": facts.id, "object": "model", "created": facts.created, "owned_by": "outrider", **sizes, **drafts}
