"""What requests ask for, and readers of their texts."""

from typing import Any

from gateway.admission.prompts import ChatSettings, PromptReader
from gateway.admission.text_threads import TextThreads
from gateway.admission.unchecked_request import FieldNames, UncheckedRequest
from gateway.api.schemas.openai import CompletionBody
from gateway.api.schemas.parsing import parse_body
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.params import BeamParams, SamplingParams
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


def predicting(content: Any, **body: Any) -> UncheckedRequest:
    prediction = {"type": "content", "content": content}
    return parse_body(CompletionBody, {"prompt": "x", "prediction": prediction, **body}).unchecked_request("id")


def demand(beams: BeamParams, **options: Any) -> UncheckedRequest:
    return UncheckedRequest(
        request_id="r",
        model="m",
        prompts=("a",),
        names=FieldNames(prompt="prompt"),
        params=SamplingParams(temperature=0.0, beams=beams),
        max_tokens=4,
        seed=1,
        num_choices=beams.width,
        **options,
    )
