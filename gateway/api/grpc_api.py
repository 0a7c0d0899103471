"""GenerationService over gRPC: translates request messages to an `UncheckedRequest`, and outputs to response messages.

`gateway.__main__` adds the servicer to its gRPC server. The functions after the class translate.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from gateway.admission.admission import NUM_LARGEST, Admission, IncomingRequest
from gateway.admission.prompts import Chat
from gateway.admission.request_checks import MAX_MESSAGES, MAX_STOPS
from gateway.admission.unchecked_request import FieldNames, Prompt, UncheckedRequest
from gateway.api.http_io import WRITE_TIMEOUT_S, internal_error
from gateway.api.request_body import BODY_TIMEOUT_S, max_values, yield_to_loop
from gateway.confined.template_shape import Message
from gateway.generation import (
    ChoiceUsage,
    FinishReason,
    OutputTimings,
    OutputToken,
    RoundOutput,
    ServedFacts,
    SpeculationOptions,
)
from gateway.output_format import OutputFormat, one_output
from gateway.telemetry.request_record import note_failure, request_id_of
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.errors import ENDINGS, DeadlineExceeded, InvalidRequest, OutriderError, RequestTooSlow
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import (
    MAX_BAD_WORDS,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    acceptance_of,
    draft_logprobs_of,
)
from outrider.wire.requests.speculation import NumDraftTokens, num_draft_tokens_from_proto
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.transport.call_limits import CallLimits, CallQueue, host_of
from outrider.wire.transport.rpc import abort, parse_message

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
"""Full name of GenerationService in gRPC."""
DEFAULT_MAX_TOKENS = 16
"""Maximal number of output tokens of a request that does not set `params.max_tokens`."""
MAX_UNREAD_CALLS = 2048
"""Maximal number of calls, of all callers together, whose request message has not arrived. One caller may have half of
this number."""
ROLES = ("system", "developer", "user", "assistant")
"""Roles that messages of a chat may have."""
FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


Request = TypeVar("Request", gateway_pb2.GenerateRequest, gateway_pb2.GetModelsRequest)


class GenerationServicer:
    """Implements the gRPC service GenerationService.

    gRPC is told that each method reads a stream of requests, although a call has one. So the method can identify the
    caller before it receives the message, and can limit the time for receiving it.
    """

    def __init__(self, admission: Admission, http_port: int = 0) -> None:
        """Create the servicer. http_port: port of the HTTP server, which GetModels returns; 0 if it is not known."""
        self._admission = admission
        self._http_port = http_port
        unread = CallLimits("calls await their message", MAX_UNREAD_CALLS, MAX_UNREAD_CALLS // 2)
        self._read_queue = CallQueue(NUM_LARGEST, NUM_LARGEST // 4, unread)
        """Limits how many messages are received at once, because their size is not known before."""

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        """Add the service to a gRPC server. Return the full names of the added services."""
        generate = grpc.stream_stream_rpc_method_handler(
            self.Generate, response_serializer=gateway_pb2.GenerateResponse.SerializeToString
        )
        models = grpc.stream_unary_rpc_method_handler(
            self.GetModels, response_serializer=gateway_pb2.GetModelsResponse.SerializeToString
        )
        handlers = {"Generate": generate, "GetModels": models}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        return [SERVICE]

    async def Generate(self, _: object, context: Context) -> None:
        """Generate the choices of one request, and write a response message for each round of each choice.

        The responses are written to the context, not yielded. The exits of the `with` blocks then run even if gRPC
        cancels the call, because the client disconnected or its deadline passed.
        """
        request_id, answer_id = request_id_of(_metadata(context, "x-request-id"), "gen")
        with self._admission.records.record(request_id, "generate_content", _metadata(context, "traceparent")):
            try:
                await self._generate(context, answer_id)
                return
            except OutriderError as error:
                failure = error
            except ENDINGS:
                raise
            except BaseException as error:
                failure = internal_error(error)
            note_failure(failure)
            await abort(context, failure)

    async def _generate(self, context: Context, answer_id: str) -> None:
        with self._incoming(context) as incoming:
            incoming.caller.count_request()
            request = await self._read(context, gateway_pb2.GenerateRequest, incoming)
            await yield_to_loop(request.ByteSize())
            unchecked = parse_request(request, answer_id, max_values(self._admission.generator.models()))
            async with self._admission.answers(unchecked, incoming) as answers:
                async for index, output in answers.stream():
                    await _write(context, response_of(unchecked.request_id, index, output))

    async def GetModels(self, _: object, context: Context) -> gateway_pb2.GetModelsResponse:
        """Return the served models and the port of the HTTP server."""
        try:
            with self._incoming(context) as incoming:
                await self._read(context, gateway_pb2.GetModelsRequest, incoming)
        except OutriderError as error:
            await abort(context, error)
        models = [_model_message(facts) for facts in self._admission.generator.models()]
        return gateway_pb2.GetModelsResponse(models=models, http_port=self._http_port)

    @contextmanager
    def _incoming(self, context: Context) -> Iterator[IncomingRequest]:
        incoming = self._admission.incoming(_metadata(context, "authorization"))
        try:
            yield incoming
        finally:
            incoming.release()

    async def _read(self, context: Context, kind: type[Request], incoming: IncomingRequest) -> Request:
        """Return the only message of a call. Raises RequestTooSlow, Overloaded, or InvalidRequest for another one."""
        caller = incoming.caller.name or host_of(context)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S), self._read_queue.one(caller):
                data: Any = await context.read()
        except TimeoutError:
            raise RequestTooSlow(f"the message did not arrive within {BODY_TIMEOUT_S:g} s; send it faster") from None
        if not isinstance(data, bytes):  # grpc.aio.EOF
            raise InvalidRequest(f"the call ended without its {kind.DESCRIPTOR.full_name}")
        incoming.hold(len(data))
        request: Request = parse_message(kind.FromString, data)
        return request


def _metadata(context: Context, name: str) -> str | None:
    metadata: Any = context.invocation_metadata() or ()
    for key, value in metadata:
        if key == name and isinstance(value, str):
            return value
    return None


async def _write(context: Context, response: gateway_pb2.GenerateResponse) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(response)
    except TimeoutError:
        raise DeadlineExceeded(f"the client read nothing for {WRITE_TIMEOUT_S:g} s") from None


def parse_request(request: gateway_pb2.GenerateRequest, request_id: str, max_prompt_ids: int) -> UncheckedRequest:
    """Convert a request message to a request that is not yet tokenized. Raises InvalidRequest, which names the field.

    max_prompt_ids: maximal number of token ids of a prompt; a longer one is refused before it is converted.
    """
    _check_lengths(request, max_prompt_ids)
    name, prompt = _prompt_of(request)
    params = _sampling_params(request)
    seed = None
    if request.has_seed:
        seed = request.params.seed
    elif request.params.seed:
        raise InvalidRequest("params.seed is given without has_seed; set has_seed to use it", param="has_seed")
    return UncheckedRequest(
        request_id=request_id,
        model=request.model,
        prompts=(prompt,),
        names=FieldNames(prompt=name, num_choices="num_choices", num_logprobs="num_logprobs"),
        params=params,
        max_tokens=request.params.max_tokens or DEFAULT_MAX_TOKENS,
        seed=seed,
        num_choices=request.num_choices or 1,
        stop=tuple(request.stop),
        bad_words=tuple(request.bad_words),
        speculation=_speculation_of(request.speculation),
        prediction=request.prediction,
        cache_salt=request.cache_salt or None,
        user=request.user or None,
        priority=request.priority,
        max_tpot_ms=request.max_tpot_ms or None,
        output=_output_of(request),
    )


def _sampling_params(request: gateway_pb2.GenerateRequest) -> SamplingParams:
    if request.params.choice:
        raise InvalidRequest(
            f"params.choice is {request.params.choice}; it is the gateway's to set, use num_choices",
            param="params.choice",
        )
    params = SamplingParams.from_proto(request.params)
    if params.beams is not None:
        if params.beams.width:
            raise InvalidRequest(
                f"params.beams.width is {params.beams.width}; set num_choices instead", param="params.beams"
            )
        beams = dataclasses.replace(params.beams, width=request.num_choices or 1)
        params = dataclasses.replace(params, beams=beams)
    for field in ("acceptance", "lenience"):
        if getattr(params, field) != getattr(SamplingParams(), field):
            raise InvalidRequest(f"params.{field} is set; give speculation.{field} instead", param=f"params.{field}")
    if params.grammar:
        raise InvalidRequest("params.grammar is set; give structured_outputs instead", param="params.grammar")
    return params


def _check_lengths(request: gateway_pb2.GenerateRequest, max_prompt_ids: int) -> None:
    # Longer lists take too long to read on the event loop.
    for name, values, max_len in (
        ("prompt_ids", request.prompt_ids.ids, max_prompt_ids),
        ("chat.messages", request.chat.messages, MAX_MESSAGES),
        ("stop", request.stop, MAX_STOPS),
        ("bad_words", request.bad_words, MAX_BAD_WORDS),
        ("params.bad_words", request.params.bad_words, MAX_BAD_WORDS),
        ("params.logit_bias", request.params.logit_bias, MAX_LOGIT_BIAS),
        ("params.stop_token_ids", request.params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("speculation.tree.widths", request.speculation.tree.widths, MAX_DRAFT_TOKENS),
    ):
        if len(values) > max_len:
            raise InvalidRequest(f"{name} has {len(values)} entries, at most {max_len} are allowed", param=name)


def _output_of(request: gateway_pb2.GenerateRequest) -> OutputFormat | None:
    if not request.HasField("structured_outputs"):
        return None
    message = request.structured_outputs
    given: dict[str, Any] = dict.fromkeys(("json", "regex", "choice", "grammar", "json_object"))
    for kind in given:
        if message.HasField(kind):
            given[kind] = getattr(message, kind)
    if given["choice"] is not None:
        given["choice"] = list(given["choice"].texts)
    given["json_object"] = given["json_object"] or None
    return one_output(given, message.strict)


def _prompt_of(request: gateway_pb2.GenerateRequest) -> tuple[str, Prompt]:
    name = request.WhichOneof("input")
    if name is None:
        raise InvalidRequest("input is missing: set prompt, prompt_ids or chat", param="input")
    if name == "prompt":
        return name, request.prompt
    if name == "prompt_ids":
        return name, tuple(request.prompt_ids.ids)
    if not request.chat.messages:
        raise InvalidRequest("chat has no messages", param="chat")
    messages = tuple(_message_of(index, message) for index, message in enumerate(request.chat.messages))
    return name, Chat(messages, tools=None)


def _message_of(index: int, message: gateway_pb2.ChatMessage) -> Message:
    if message.role not in ROLES:
        name = f"chat.messages[{index}].role"
        raise InvalidRequest(f"{name} is {message.role!r}, must be one of {', '.join(ROLES)}", param=name)
    return {"role": message.role, "content": message.content}


def _speculation_of(options: gateway_pb2.SpeculationOptions) -> SpeculationOptions:
    return SpeculationOptions(
        enabled=options.enabled or not options.HasField("enabled"),
        num_draft_tokens=_num_draft_tokens(options),
        draft_logprobs=draft_logprobs_of(options.draft_logprobs, "speculation.draft_logprobs"),
        draft_topk=options.draft_topk or None,
        acceptance=acceptance_of(options.acceptance, "speculation.acceptance"),
        lenience=_lenience(options),
        drafter=_drafter(options),
        tree=_tree_shape(options),
        explain=options.explain,
    )


def _lenience(options: gateway_pb2.SpeculationOptions) -> float | None:
    if not options.HasField("lenience"):
        return None
    return options.lenience


def _drafter(options: gateway_pb2.SpeculationOptions) -> Drafter | None:
    if not options.drafter:
        return None
    return Drafter.parse(options.drafter, "speculation.drafter")


def _tree_shape(options: gateway_pb2.SpeculationOptions) -> TreeShape | None:
    if not options.HasField("tree"):
        return None
    return TreeShape.from_proto(options.tree, "speculation.tree")


def _num_draft_tokens(options: gateway_pb2.SpeculationOptions) -> NumDraftTokens | None:
    if not options.HasField("num_draft_tokens"):
        return None
    return num_draft_tokens_from_proto(options.num_draft_tokens, "speculation.num_draft_tokens")


def response_of(request_id: str, choice: int, output: RoundOutput) -> gateway_pb2.GenerateResponse:
    """Return the response message for `output`, which a round added to the choice with index `choice`."""
    usage = None
    if output.usage is not None:
        usage = _usage_of(output.usage)
    stop_reason = ""
    if output.stop_reason is not None:
        stop_reason = str(output.stop_reason)
    return gateway_pb2.GenerateResponse(
        request_id=request_id,
        choice=choice,
        tokens=[_token_of(token) for token in output.tokens],
        text_delta=output.text_delta,
        finish_reason=FINISH_REASONS[output.finish_reason],
        num_drafted=output.num_drafted,
        num_accepted=output.num_accepted,
        usage=usage,
        stop_reason=stop_reason,
        timings=_timings_of(output.timings),
        score=output.score,
        explanation=output.explanation,
    )


def _usage_of(usage: ChoiceUsage) -> gateway_pb2.Usage:
    message = gateway_pb2.Usage(plain_reason=usage.plain_reason)
    for field in dataclasses.fields(usage):
        value = getattr(usage, field.name)
        if field.name != "plain_reasons" and value is not None:
            setattr(message, field.name, value)
    return message


def _token_of(token: OutputToken) -> gateway_pb2.GeneratedToken:
    message = gateway_pb2.GeneratedToken(id=token.id, kind=token.kind.value, text=token.text)
    if token.logprobs is not None:
        message.logprobs.logprob = token.logprobs.logprob
        for token_id, logprob in token.logprobs.top:
            message.logprobs.top_ids.append(token_id)
            message.logprobs.top_logprobs.append(logprob)
    return message


def _model_message(facts: ServedFacts) -> gateway_pb2.Model:
    return gateway_pb2.Model(
        id=facts.id,
        context_limit=facts.context_limit,
        vocab_size=facts.vocab_size,
        draft_id=facts.draft_id,
        drafters=facts.drafters,
    )


def _timings_of(timings: OutputTimings) -> gateway_pb2.RoundTimings:
    return gateway_pb2.RoundTimings(
        total_us=round(timings.total_s * 1e6),
        deliver_us=round(timings.deliver_s * 1e6),
        verify_us=round(timings.verify_s * 1e6),
        overhead_us=round(timings.overhead_s * 1e6),
    )
