"""What cannot be served is refused by name over HTTP and gRPC, and leaves nothing in the workers.

Proposals that break a rule: test_draft_failure.py. Pairs and folders that cannot work: test_incompatible_pair.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from outrider.v1 import common_pb2 as pb
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from tests.stack import Stack

MAX_BODY = 4 << 20


@pytest.fixture(autouse=True)
def _leaves_nothing(stack: Stack) -> Iterator[None]:
    """Every test of this file: no slot, block or ticket is held, and the next request is served."""
    yield
    for info in (stack.target_info(), stack.draft_info()):
        assert (info.num_slots_in_use, info.num_kv_blocks_in_use, info.num_tickets) == (0, 0, 0)
    metrics = stack.metrics()
    assert metrics["outrider_running"] == metrics["outrider_queue_depth"] == 0


def post(stack: Stack, path: str = "/v1/completions", **how: Any) -> httpx.Response:
    return httpx.post(f"{stack.http}{path}", timeout=60, **how)


def refusal(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


HTTP_ROWS: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"max_tokens": 2048}, "max_tokens", ("2048",)),
    ({"prompt": [5] * 2000, "max_tokens": 100}, "max_tokens", ("2000", "100", "2100", "2048", "48")),
    ({"prompt": [5] * 2048}, "prompt", ("2048",)),
    ({"prompt": [5, 4096]}, "prompt", ("prompt[1] is 4096", "4095")),
    ({"prompt": [-1]}, "prompt", ("prompt[0] is -1",)),
    ({"prompt": []}, "prompt", ("empty",)),
    ({"prompt": ""}, "prompt", ("empty",)),
    ({"prompt": 7}, "prompt", ("must be",)),
    ({"temperature": -0.1}, "temperature", ("-0.1", "from 0 to 100")),
    ({"temperature": 101}, "temperature", ("101",)),
    ({"temperature": "0.5"}, "temperature", ("'0.5'",)),
    ({"top_p": 0}, "top_p", ("0", "greater than 0")),
    ({"top_p": 1.01}, "top_p", ("1.01",)),
    ({"top_k": -2}, "top_k", ("-2",)),
    ({"min_p": 2}, "min_p", ("2",)),
    ({"repetition_penalty": 0}, "repetition_penalty", ("0",)),
    ({"presence_penalty": 2.5}, "presence_penalty", ("2.5",)),
    ({"frequency_penalty": -3}, "frequency_penalty", ("-3",)),
    ({"logit_bias": {"4096": 1}}, "logit_bias", ("4096", "4095")),
    ({"logit_bias": {"word": 1}}, "logit_bias", ("word",)),
    ({"logit_bias": {"1": 101}}, "logit_bias", ("101",)),
    ({"stop_token_ids": [4096]}, "stop_token_ids", ("stop_token_ids[0] is 4096",)),
    ({"bad_words": [" "]}, "bad_words", ("no word",)),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ("9",)),
    ({"seed": 2**64}, "seed", ("1.8446744073709552e+19",)),
    ({"n": 129}, "n", ("129",)),
    ({"logprobs": 21}, "logprobs", ("21",)),
    ({"stop": ["x"] * 17}, "stop", ("17",)),
    ({"best_of": 2}, "best_of", ("2",)),
    ({"tools": [{"type": "function"}]}, "tools", ("not offered",)),
    ({"banana": 1}, "banana", ("unknown parameter banana",)),
    ({"speculation": {"num_draft_tokens": -1}}, "speculation.num_draft_tokens", ("-1",)),
    ({"speculation": {"draft_logprobs": "topk:0"}}, "speculation.draft_logprobs", ("0",)),
    ({"speculation": {"draft_logprobs": "half"}}, "speculation.draft_logprobs", ("half",)),
    ({"stream_options": {"include_usage": True}}, "stream_options", ("stream",)),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("fields", "param", "told"), HTTP_ROWS, ids=[json.dumps(row[0])[:40] for row in HTTP_ROWS])
def test_http_names_the_field_and_the_value(
    stack: Stack, fields: dict[str, Any], param: str, told: tuple[str, ...], stream: bool
) -> None:
    """The same before a stream: a status, no event."""
    if stream and "stream_options" in fields:
        fields = {"stream_options": {"colour": 1}}
        param, told = "stream_options.colour", ("unknown",)
    error = refusal(post(stack, json={"prompt": "def f():", "stream": stream, **fields}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert all(each in error["message"] for each in told), error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2048}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2048}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    ],
)
def test_chats_too(stack: Stack, fields: dict[str, Any], param: str | None) -> None:
    body = json.dumps(fields)  # a lone surrogate travels as an escape
    error = refusal(post(stack, "/v1/chat/completions", content=body))
    assert error["param"] == param


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid JSON"),  # a surrogate, encoded
        (b'{"prompt": "x", "temperature": 1e999}', "number is infinity"),
        (b"[1]", "must be an object"),
        (b'"text"', "must be an object"),
    ],
)
def test_bodies_that_say_nothing(stack: Stack, content: bytes, told: str) -> None:
    assert told in refusal(post(stack, content=content))["message"]


def test_a_body_over_the_limit_is_413_before_it_is_read(stack: Stack) -> None:
    error = refusal(post(stack, json={"prompt": "x" * MAX_BODY}), 413)
    assert str(MAX_BODY) in error["message"]
    url = urlsplit(stack.http)
    with socket.create_connection((url.hostname, url.port), timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert b" 413 " in raw.recv(4096)


def test_unknown_models_paths_and_methods(stack: Stack) -> None:
    error = refusal(post(stack, json={"prompt": "x", "model": "gpt-4"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-4'" in error["message"]
    assert stack.model in error["message"]
    assert "/v1/embeddings" in refusal(post(stack, "/v1/embeddings", json={}), 404)["message"]
    assert "GET" in refusal(httpx.get(f"{stack.http}/v1/completions"), 405)["message"]


@pytest.fixture(scope="module")
def stub(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.grpc) as channel:
        yield gateway_pb2_grpc.GenerationServiceStub(channel)


def request(params: dict[str, Any] | None = None, **fields: Any) -> gateway_pb2.GenerateRequest:
    if not {"prompt", "prompt_ids", "chat"} & fields.keys():
        fields["prompt"] = "def f():"
    return gateway_pb2.GenerateRequest(params=pb.SamplingParams(**params or {}), **fields)


def ids(*values: int) -> pb.TokenSequence:
    return pb.TokenSequence(ids=values)


GRPC_ROWS: list[tuple[gateway_pb2.GenerateRequest, str, str]] = [
    (gateway_pb2.GenerateRequest(), "input", "input is missing"),
    (request(prompt=""), "prompt", "empty"),
    (request(prompt_ids=ids()), "prompt_ids", "empty"),
    (request(prompt_ids=ids(5, 4096)), "prompt_ids", "prompt_ids[1] is 4096, must be a token id from 0 to 4095"),
    (
        request({"max_tokens": 100}, prompt_ids=ids(*[5] * 2000)),
        "max_tokens",
        "together 2100; the context limit is 2048",
    ),
    (request(prompt_ids=ids(*[5] * 2048)), "prompt_ids", "2048 tokens, the context limit is 2048"),
    (request({"temperature": float("nan")}), "temperature", "temperature is nan"),
    (request({"temperature": -1.0}), "temperature", "temperature is -1"),
    (request({"temperature": float("inf")}), "temperature", "temperature is inf"),
    (request({"top_p": float("nan")}), "top_p", "top_p is nan"),
    (request({"top_p": 0.0}), "top_p", "top_p is 0"),
    (request({"min_p": float("nan")}), "min_p", "min_p is nan"),
    (request({"repetition_penalty": 0.0}), "repetition_penalty", "repetition_penalty is 0"),
    (request({"presence_penalty": float("nan")}), "presence_penalty", "presence_penalty is nan"),
    (request({"frequency_penalty": 9.0}), "frequency_penalty", "frequency_penalty is 9"),
    (request({"logit_bias": {4096: 1.0}}), "logit_bias", "4096"),
    (request({"logit_bias": {1: float("nan")}}), "logit_bias", "nan"),
    (request({"bad_words": [ids(4096)]}), "bad_words", "4096"),
    (request({"bad_words": [ids()]}), "bad_words", "empty"),
    (request({"stop_token_ids": [4096]}), "stop_token_ids", "4096"),
    (request({"num_logprobs": 21}), "num_logprobs", "21"),
    (request({"min_tokens": 17}), "min_tokens", "17"),
    (request({"choice": 1}), "params.choice", "num_choices"),
    (request({"seed": 5}), "has_seed", "has_seed"),
    (request(num_choices=129), "num_choices", "129"),
    (request(stop=[""]), "stop", "0 characters"),
    (request(stop=["x"] * 17), "stop", "17"),
    (request(chat=gateway_pb2.ChatInput()), "chat", "no messages"),
    (
        request(chat=gateway_pb2.ChatInput(messages=[gateway_pb2.ChatMessage(role="wizard", content="x")])),
        "chat.messages[0].role",
        "wizard",
    ),
    (
        request(speculation=gateway_pb2.SpeculationOptions(num_draft_tokens=65)),
        "speculation.num_draft_tokens",
        "65",
    ),
]


@pytest.mark.parametrize(("message", "param", "told"), GRPC_ROWS, ids=[row[2][:40] for row in GRPC_ROWS])
def test_grpc_names_the_field_and_the_value(
    stub: Any, message: gateway_pb2.GenerateRequest, param: str, told: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(message, timeout=60))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert told in error.details()
    assert dict(error.trailing_metadata())["outrider-param"] == param


def test_grpc_unknown_models_and_messages_over_the_limit(stub: Any, stack: Stack) -> None:
    with pytest.raises(grpc.RpcError) as unknown:
        list(stub.Generate(request(model="gpt-4"), timeout=60))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert stack.model in unknown.value.details()
    with pytest.raises(grpc.RpcError) as too_large:
        list(stub.Generate(request(prompt="x" * (65 << 20)), timeout=60))
    assert too_large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x12\x02\xff\xfe"], ids=["no message", "prompt is no UTF-8"])
def test_grpc_bytes_that_are_no_message(stack: Stack, raw: bytes) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        call = channel.unary_stream("/outrider.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(raw, timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "is no valid outrider.v1.GenerateRequest" in refused.value.details()


def test_an_error_in_one_of_a_batch_starts_none(stack: Stack) -> None:
    before = stack.metrics()["outrider_prompt_tokens_total"]
    error = refusal(post(stack, json={"prompt": [[5, 6], [5, 4096]], "max_tokens": 4}))
    assert error["param"] == "prompt"
    assert stack.metrics()["outrider_prompt_tokens_total"] == before


def test_after_all_that_it_serves(stack: Stack) -> None:
    reply = post(stack, json={"prompt": "def f():", "max_tokens": 8, "temperature": 0, "ignore_eos": True})
    assert reply.json()["usage"]["completion_tokens"] == 8
