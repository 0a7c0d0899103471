"""What a checkpoint states for requests that name no sampling parameters: read, and applied on every endpoint alike."""

import dataclasses
from typing import Any

import pytest

from gateway.admission.requests import build_requests
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.layers.messages_schemas import MessagesBody
from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.schemas.openai import ChatBody, CompletionBody
from gateway.api.schemas.parsing import parse_body
from gateway.generation import GenerationRequest, ServedFacts
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.sampling_defaults import read_defaults, usable_defaults
from tests.checkers import inline_checker
from tests.service.scripted_generator import config
from tests.unit.gateway.admission.asked import reader_of

FILE = {"temperature": 0.6, "top_k": 1, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.5, "max_new_tokens": 40}
STATED = {"temperature": 0.6, "top_k": 1, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.5, "max_tokens": 40}
HELLO = [{"role": "user", "content": "hello"}]
BODIES: list[tuple[Any, dict[str, Any]]] = [
    (CompletionBody, {"prompt": "hello"}),
    (ChatBody, {"messages": HELLO}),
    (ResponsesBody, {"input": "hello"}),
    (MessagesBody, {"messages": HELLO, "max_tokens": 9}),
]


async def built(demand: UncheckedRequest, stated: dict[str, float] = STATED) -> GenerationRequest:
    facts = ServedFacts("m", 2048, 4096, 0, 1, None, sampling_defaults=stated)
    request, *_ = await build_requests(demand, facts, reader_of(), config(), inline_checker())
    return request


def sampling(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}


def test_a_file_states_what_it_names_and_no_more() -> None:
    assert read_defaults(FILE | {"transformers_version": "5", "do_sample": True}) == (STATED, [])
    assert read_defaults({"top_k": None, "eos_token_id": 2}) == ({}, [])
    found, wrong = read_defaults({"top_k": float("inf"), "max_new_tokens": float("nan"), "temperature": 10**400})
    assert found == {} and len(wrong) == 3
    assert read_defaults(FILE | {"do_sample": False}) == ({"temperature": 0.0, "max_tokens": 40}, [])
    found, wrong = read_defaults({"temperature": "0.6", "top_k": 1.5, "top_p": 0, "min_p": True, "max_new_tokens": 0})
    assert found == {} and len(wrong) == 5 and "top_p is 0, must be greater than 0 and at most 1" in wrong
    for value in (float("nan"), float("inf"), 10**400):
        assert read_defaults({"top_k": value, "max_new_tokens": value})[0] == {}
    assert usable_defaults({"temperature": 1e9, "top_p": float("nan"), "top_k": 3}) == {"top_k": 3}


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=[kind.__name__ for kind, _ in BODIES])
async def test_a_request_gets_what_it_does_not_name(kind: Any, body: dict[str, Any]) -> None:
    stated = {name: value for name, value in STATED.items() if name != "max_tokens"}
    request = await built(parse_body(kind, body).unchecked_request("id"))
    assert sampling(request.params) == stated and type(request.params.top_k) is int
    named = {"temperature": 0.9, "top_k": -1}
    request = await built(parse_body(kind, body | named).unchecked_request("id"))
    assert sampling(request.params) == stated | {"temperature": 0.9, "top_k": 0}
    request = await built(parse_body(kind, body | {"temperature": 0}).unchecked_request("id"))
    assert sampling(request.params) == sampling(SamplingParams(temperature=0.0)), "greedy, without the file's penalty"
    request = await built(
        parse_body(kind, body | {"temperature": 0, "repetition_penalty": 1.2}).unchecked_request("id")
    )
    assert sampling(request.params) == sampling(SamplingParams(temperature=0.0, repetition_penalty=1.2))


async def test_a_stated_length_is_that_of_chats_that_name_none() -> None:
    assert (await built(parse_body(ChatBody, {"messages": HELLO}).unchecked_request("id"))).params.max_tokens == 40
    named = parse_body(ChatBody, {"messages": HELLO, "max_tokens": 50}).unchecked_request("id")
    assert (await built(named)).params.max_tokens == 50
    assert (await built(parse_body(CompletionBody, {"prompt": "a"}).unchecked_request("id"))).params.max_tokens == 16


async def test_beams_and_front_ends_that_name_all_are_as_they_stand() -> None:
    beams = parse_body(CompletionBody, {"prompt": "a", "use_beam_search": True, "n": 2}).unchecked_request("id")
    assert sampling((await built(beams)).params) == sampling(SamplingParams(temperature=0.0))
    asked = parse_body(CompletionBody, {"prompt": "a"}).unchecked_request("id")
    whole = await built(dataclasses.replace(asked, named=None))
    assert sampling(whole.params) == sampling(SamplingParams())
