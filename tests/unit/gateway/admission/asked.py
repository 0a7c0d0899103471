"""What requests ask for, and readers of their texts."""

from typing import Any

from gateway.admission.prompts import ChatSettings, PromptReader
from gateway.admission.requests import build_requests
from gateway.admission.text_threads import TextThreads
from gateway.admission.unchecked_request import FieldNames, UncheckedRequest
from gateway.api.schemas.openai import CompletionBody
from gateway.api.schemas.parsing import parse_body
from gateway.generation import GenerationRequest, ServedFacts
from gateway.grammar_checker import GrammarChecker
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.params import BeamParams, SamplingParams
from tests.checkers import inline_checker
from tests.service.scripted_generator import ScriptedGenerator, config, demo_tokenizer
from tests.unit.gateway.scripted_pool import INFO


def info(beams: bool) -> pb.WorkerInfo:
    found = pb.WorkerInfo.FromString(INFO.SerializeToString())
    found.supports_beams = beams
    return found


TOKENIZER = demo_tokenizer()
FACTS = ScriptedGenerator(TOKENIZER).models()[0]
THREADS = TextThreads()


def reader_of(**changes: Any) -> PromptReader:
    settings = ChatSettings.from_config(config())
    return PromptReader(TOKENIZER, FACTS.context_limit, b"", THREADS, config().max_body_bytes, settings, **changes)


async def built(
    demand: UncheckedRequest,
    *caller: Any,
    facts: ServedFacts = FACTS,
    reader: PromptReader | None = None,
    checker: GrammarChecker | None = None,
    **settings: Any,
) -> list[GenerationRequest]:
    """What becomes of it, with grammars checked in this process."""
    return await build_requests(
        demand, facts, reader or reader_of(), config(**settings), checker or inline_checker(), *caller
    )


def predicting(content: Any, **body: Any) -> UncheckedRequest:
    prediction = {"type": "content", "content": content}
    return parse_body(CompletionBody, {"prompt": "x", "prediction": prediction, **body}).unchecked_request("id")


def demand(beams: BeamParams | None, **options: Any) -> UncheckedRequest:
    return UncheckedRequest(
        request_id="r",
        model="m",
        prompts=("a",),
        names=FieldNames(prompt="prompt"),
        params=SamplingParams(temperature=0.0, beams=beams),
        max_tokens=4,
        seed=1,
        num_choices=beams.width if beams else 1,
        **options,
    )
