"""The HTTP front end, with a scripted generator behind it: OpenAI's forms, errors, limits, and clients that leave."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import Counter

from gateway.admission.prompts import INLINE_CHARS
from gateway.api.schemas.other_parameters import REPLACEMENTS
from gateway.tokenizer import Tokenizer
from outrider.wire.errors import WorkerLost
from outrider.wire.kinds import DraftLogprobs
from tests.service.front_door import admission_of, http_of, in_process, served
from tests.service.scripted_generator import (
    CONTEXT_LIMIT,
    DEMO,
    NUM_DRAFTED,
    Panic,
    ScriptedGenerator,
    demo_tokenizer,
    logged,
)

TOKENIZER = demo_tokenizer()
MODEL = "models/demo/target"
TEXT = "the quick brown fox"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text))


def events_of(body: str) -> list[Any]:
    """Parsed data of each event but the last, which must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# --- whole answers -----------------------------------------------------------------------------------------------


async def test_a_completion_has_openai_form_and_what_speculation_did(generator: ScriptedGenerator) -> None:
    async with in_process(generator) as http:
        response = await http.post(COMPLETIONS, json={"model": MODEL, "prompt": "Once", "seed": -1, "max_tokens": 50})
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("cmpl-") and response.headers["x-request-id"] == body["id"]
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    choice = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert body["choices"] == [choice]
    completion, rounds = num_tokens(TEXT), -(-num_tokens(TEXT) // 3)
    assert body["usage"] == {
        "prompt_tokens": num_tokens("Once"),
        "completion_tokens": completion,
        "total_tokens": num_tokens("Once") + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
        "speculation": {
            "num_rounds": rounds,
            "num_plain_steps": 0,
            "plain_reason": None,
            "num_draft_tokens": NUM_DRAFTED * rounds,
            "num_accepted_tokens": 2 * rounds,
            "acceptance_rate": 2 / NUM_DRAFTED,
            "mean_accepted_length": 3.0,
            "num_overrun_tokens": max(0, 3 * rounds - completion - 1),
            "mean_emitted_length": completion / rounds,
            "seed": 2**64 - 1,
            "seeds": [2**64 - 1],
            "lenience": None,
        },
    }
    assert generator.num_open == 0


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_with_kinds_each_round_sends_its_tokens_though_its_text_is_held_back(
    generator: ScriptedGenerator, endpoint: str
) -> None:
    ids, kinds = TOKENIZER.encode(TEXT), ["accepted", "accepted", "recovered"]
    expected = [
        {"id": token_id, "text": TOKENIZER.token_text(token_id), "kind": kinds[place % 3]}
        for place, token_id in enumerate(ids)
    ]
    body: dict[str, Any] = {"stop": [TEXT + " jumps"], "speculation": {"token_kinds": True}}
    body |= {"prompt": "x"} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    async with in_process(generator) as http:
        whole = (await http.post(endpoint, json=body)).json()
        events = events_of((await http.post(endpoint, json={**body, "stream": True})).text)
    assert whole["choices"][0]["speculation"] == {"tokens": expected}
    rounds = [event["choices"][0]["speculation"]["tokens"] for event in events]
    assert rounds == [expected[start : start + 3] for start in range(0, len(ids), 3)] and len(rounds) > 1


async def test_all_parameters_arrive(generator: ScriptedGenerator) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 1, "min_tokens": 2}
    more = {"frequency_penalty": -1, "repetition_penalty": 1.2, "stop_token_ids": [9], "ignore_eos": True}
    body = {**sampling, **more, "logit_bias": {"11": -100}, "bad_words": ["fox"], "stop": ["\n\n", "END"]}
    speculation = {"enabled": True, "num_draft_tokens": 3, "draft_logprobs": "topk:64"}
    async with in_process(generator) as http:
        response = await http.post(COMPLETIONS, json={"prompt": "x", **body, "speculation": speculation})
    assert response.status_code == 200, response.text
    request = generator.requests[0]
    for name, value in (sampling | more).items():
        got = getattr(request.params, name)
        assert (list(got) if isinstance(got, tuple) else got) == value, name
    assert request.params.logit_bias == {11: -100}
    assert request.params.max_tokens == 16
    words = {tuple(TOKENIZER.encode("fox")), tuple(TOKENIZER.encode(" fox"))}
    assert set(request.params.bad_words) == words
    assert request.stop == ("\n\n", "END")
    wishes = request.speculation
    assert (wishes.num_draft_tokens, wishes.draft_logprobs, wishes.draft_topk) == (3, DraftLogprobs.TOPK, 64)


async def test_a_chat_goes_through_the_template_and_takes_what_the_context_leaves(generator: ScriptedGenerator) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": parts}]
    async with in_process(generator) as http:
        answer = (await http.post(CHAT, json={"messages": messages})).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    request = generator.requests[0]
    assert TOKENIZER.decode(request.prompt_ids) == "a\n\nbc", "the template reads parts"
    assert request.params.max_tokens == 2048 - len(request.prompt_ids)


async def test_completion_logprobs_are_four_parallel_lists(generator: ScriptedGenerator) -> None:
    generator.text = "a 😀"
    async with in_process(generator) as http:
        answer = (await http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 2})).json()
        bare = (await http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 0})).json()
    logprobs = answer["choices"][0]["logprobs"]
    raw = b"".join(
        token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")
        if token.startswith("bytes:")
        else token.encode()
        for token in logprobs["tokens"]
    )
    assert raw.decode() == "a 😀", "tokens give back the bytes, cut characters too"
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    assert logprobs["text_offset"][:2] == [0, 1]
    assert all(len(top) == 2 and min(top.values()) == -9999.0 for top in logprobs["top_logprobs"])
    chosen = [list(top) for top in bare["choices"][0]["logprobs"]["top_logprobs"]]
    assert chosen == [[token] for token in logprobs["tokens"]]


# --- streams -----------------------------------------------------------------------------------------------------


async def test_a_stream_is_one_event_a_round_then_usage_then_done(generator: ScriptedGenerator) -> None:
    body = {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50}
    async with in_process(generator) as http:
        response = await http.post(COMPLETIONS, json=body)
        whole = (await http.post(COMPLETIONS, json={**body, "stream": False, "stream_options": None})).json()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    *chunks, last = events_of(response.text)
    assert len(chunks) == -(-num_tokens(TEXT) // 3)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["id"] for chunk in chunks} == {last["id"]} == {response.headers["x-request-id"]}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    seeds = [usage["speculation"].pop("seed") for usage in (last["usage"], whole["usage"])]
    assert [usage["speculation"].pop("seeds") for usage in (last["usage"], whole["usage"])] == [
        [seed] for seed in seeds
    ]
    assert seeds[0] != seeds[1]
    assert last["usage"] == whole["usage"]


async def test_an_error_before_the_first_event_is_a_status_and_later_an_event(generator: ScriptedGenerator) -> None:
    body = {"prompt": "x", "stream": True}
    async with in_process(generator) as http:
        generator.fail_at = (0, WorkerLost("the target is gone"))
        early = await http.post(COMPLETIONS, json=body)
        generator.fail_at = (1, WorkerLost("the target is gone"))
        late = await http.post(COMPLETIONS, json=body)
        whole = await http.post(COMPLETIONS, json={"prompt": "x"})
    error = {"message": "the target is gone", "type": "server_error", "param": None, "code": None}
    assert (early.status_code, early.json()) == (503, {"error": error})
    assert (whole.status_code, whole.json()) == (503, {"error": error})
    assert late.status_code == 200
    assert [event.get("error") for event in events_of(late.text)] == [None, error]
    assert generator.num_open == 0


@pytest.mark.parametrize("fault", [RuntimeError("secret prompt"), Panic("secret prompt")])
async def test_our_own_faults_are_500_and_never_logged_with_a_prompt(
    generator: ScriptedGenerator, caplog: pytest.LogCaptureFixture, fault: BaseException
) -> None:
    caplog.set_level("INFO")
    async with in_process(generator) as http:
        for round_number, stream in ((0, False), (0, True), (1, True)):
            generator.fail_at = (round_number, fault)
            response = await http.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
            assert response.status_code == (200 if round_number else 500)
            assert "internal error" in response.text and "x-request-id" in response.headers
    log = logged(caplog)
    assert type(fault).__name__ in log and "secret" not in log
    assert log.count(": internal in ") == 3, "each has its record"


async def test_a_tokenizer_that_panics_at_a_text_is_a_fault_of_ours() -> None:
    data = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    data["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(x+x+)+y"},  # its engine gives up after so many steps
        "behavior": "Isolated",
        "invert": False,
    }
    async with in_process(ScriptedGenerator(Tokenizer(json.dumps(data), {}, None))) as http:
        for prompt in ("x" * 60, "x" * 60 + " " * INLINE_CHARS):  # on the event loop, and on a thread
            response = await http.post(COMPLETIONS, json={"prompt": prompt})
            assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
            assert "x-request-id" in response.headers


# --- refusals ----------------------------------------------------------------------------------------------------

REFUSED = [
    ({"prompt": "x", "temprature": 1}, "temprature"),
    ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "x", "truncate_prompt_tokens": 9, "suffix": "y"}, "truncate_prompt_tokens"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "logit_bias": {"3": 1, "03": -1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"prompt": "x", "bad_words": ["a"] * 257}, "bad_words"),
    ({"prompt": "x", "bad_words": ["a" * 1025]}, "bad_words"),
    ({"prompt": "x", "stop": ["a" * 1025]}, "stop"),
    ({"prompt": "x", "stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"prompt": "x", "user": "a" * 1025}, "user"),
    ({"prompt": [[5]] * 5000}, "prompt"),
    ({"prompt": "x", "speculation": {f"k{i}": 1 for i in range(100)}}, "speculation"),
    ({"prompt": "x", "speculation": {"draft_logprobs": "topk:" + "9" * 5000}}, "speculation.draft_logprobs"),
    ({"prompt": "x", "seed": 2**64}, "seed"),
    ({"prompt": ["x"] * 11, "n": 30}, "prompt"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 2048, "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ({"prompt": [1] * 2000, "min_tokens": 49, "max_tokens": 50}, "min_tokens"),
    ({"prompt": [1] * 2048}, "prompt"),
    ({"prompt": "x", "cache_salt": "ö" * 129}, "cache_salt"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"extra": 1}}, "stream_options.extra"),
    ({"prompt": [4096]}, "prompt"),
    ({}, "prompt"),
    ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}}},
        "response_format.json_schema.schema.items.not",
    ),
    ({"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    *(({"prompt": "x", name: {}}, name) for name in REPLACEMENTS),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_cannot_be_is_refused_by_name(
    generator: ScriptedGenerator, body: dict[str, Any], param: str
) -> None:
    async with in_process(generator) as http:
        response = await http.post(CHAT if "messages" in body else COMPLETIONS, json=body)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert generator.requests == [], "nothing may have been started"


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"n": 1}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": "x"}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"best_of": 5}, "best_of"),
        ({"length_penalty": 9.0}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction.content"),
        ({"speculation": {"tree": "2x2"}}, "speculation.tree"),
        ({"speculation": {"lenience": 0.5}}, "speculation.lenience"),
        ({"speculation": {"drafter": "ngram"}}, "speculation.drafter"),
        ({"max_tokens": 1900, "n": 32}, "max_tokens"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
    ],
)
async def test_what_a_beam_search_does_not_go_with_is_refused_by_name(
    generator: ScriptedGenerator, wishes: dict[str, Any], param: str
) -> None:
    body = {"prompt": "a", "n": 4, "use_beam_search": True, "max_tokens": 8} | wishes
    async with in_process(generator) as http:
        reply = await http.post(COMPLETIONS, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}'],
    ids=["empty", "cut", "list", "invalid utf-8", "lone surrogate", "nan"],
)
async def test_bodies_that_are_no_json_objects(generator: ScriptedGenerator, raw: bytes) -> None:
    async with in_process(generator) as http:
        response = await http.post(COMPLETIONS, content=raw)
    assert response.status_code == 400
    assert "body is" in response.json()["error"]["message"]


async def test_a_name_of_another_server_is_answered_with_that_of_this_one(generator: ScriptedGenerator) -> None:
    async with in_process(generator) as http:
        response = await http.post(COMPLETIONS, json={"prompt": "x", "guided_json": {"type": "object"}})
        none = await http.post(COMPLETIONS, json={"prompt": "x", "guided_json": None})
        unknown = await http.post(COMPLETIONS, json={"prompt": "x", "typo": 1})
    assert '"structured_outputs": {"json": ...}' in response.json()["error"]["message"]
    assert none.status_code == 200
    assert "GET /openapi.json" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, {"prompt": "hello"}, "max_tokens"),
        (CHAT, {"messages": HELLO}, "max_tokens"),
        (CHAT, {"messages": HELLO}, "max_completion_tokens"),
        ("/v1/responses", {"input": HELLO}, "max_output_tokens"),
        ("/v1/messages", {"messages": HELLO}, "max_tokens"),
    ],
)
async def test_more_output_than_the_context_leaves_means_what_it_leaves(
    generator: ScriptedGenerator, path: str, body: dict[str, object], name: str
) -> None:
    async with in_process(generator) as http:
        response = await http.post(path, json={**body, name: 1 << 40})
    assert response.status_code == 200, response.text
    (request,) = generator.requests
    assert request.params.max_tokens == CONTEXT_LIMIT - len(request.prompt_ids)


async def test_bodies_over_the_limit_are_413_declared_or_not(generator: ScriptedGenerator) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async with in_process(generator, max_body_bytes=1000) as http:
        declared = await http.post(COMPLETIONS, content=b" " * 1001)
        chunked = await http.post(COMPLETIONS, content=parts())
    assert declared.status_code == chunked.status_code == 413
    assert "1000 bytes" in chunked.json()["error"]["message"]


async def test_unknown_models_routes_and_methods(generator: ScriptedGenerator) -> None:
    async with in_process(generator) as http:
        model = await http.post(COMPLETIONS, json={"prompt": "x", "model": "gpt-9"})
        assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
        assert MODEL in model.json()["error"]["message"]
        assert (await http.get("/v1/models/gpt-9")).status_code == 404
        assert (await http.get("/v1/models/")).status_code == 404
        route = await http.post("/v1/embeddings", json={})
        assert (route.status_code, route.json()["error"]["type"]) == (404, "invalid_request_error")
        method = await http.get(COMPLETIONS)
        assert (method.status_code, method.headers["allow"]) == (405, "POST")
        assert method.headers["x-request-id"].startswith("req-")


# --- the rest ----------------------------------------------------------------------------------------------------


async def test_models_health_readiness_and_metrics(generator: ScriptedGenerator) -> None:
    admission = admission_of(generator)
    Counter("spec_rounds", "Rounds.", registry=admission.registry).inc(3)
    async with http_of(admission) as http:
        listed = (await http.get("/v1/models")).json()
        assert [(model["id"], model["display_name"], model["type"]) for model in listed["data"]] == [
            (MODEL, MODEL, "model")
        ]
        assert (await http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "reason": None, "refused": ["a draft: why"]})
        health = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
        answers = [await http.request(method, path) for method, path in health]
        assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"")] * 3
        generator.reason = "no target at 127.0.0.1:1"
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, generator.reason)
        answers = [await http.request(method, path) for method, path in health]
        assert [(answer.status_code, answer.content) for answer in answers] == [(503, b"")] * 3
        assert (await http.get("/healthz")).status_code == 200
        metrics = await http.get("/metrics")
    assert "spec_rounds_total 3.0" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_at", [0, 1])
async def test_a_client_that_leaves_frees_its_place_at_once(
    generator: ScriptedGenerator, stream: bool, pause_at: int
) -> None:
    generator.pause_at = pause_at
    async with served(generator) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        call = asyncio.create_task(_read(http, {"prompt": "x", "stream": stream}))
        await asyncio.wait_for(generator.paused.wait(), 10)
        assert generator.num_open == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(generator.all_left.wait(), 10)
    assert generator.num_open == 0


async def _read(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", COMPLETIONS, json=body, timeout=30) as response:
        async for _ in response.aiter_bytes():
            pass


NAMES = b",".join(b'"k%d":1' % i for i in range(90_000))
HOSTILE = {
    "names": (b'{"prompt": "x", ' + NAMES + b"}", "has 90001 fields, at most 64"),
    "names in a part": (b'{"prompt": "x", "speculation": {' + NAMES + b"}}", "has 90000 fields, at most 64"),
    "messages": (b'{"messages": [' + b",".join([b'{"role":"user","content":""}'] * 30_000) + b"]}", "at most 4096"),
    "bad messages": (b'{"messages": [' + b",".join([b'{"role":1,"content":1}'] * 30_000) + b"]}", "messages[0].role"),
    "prompts": (b'{"prompt": [' + b",".join([b"[5]"] * 90_000) + b"]}", "has 90000 prompts, at most 4096"),
    "a name": (b'{"prompt": "x", "' + b"z" * 3_000_000 + b'": 1}', "unknown parameter zzz"),
}


@pytest.mark.parametrize(("body", "told"), HOSTILE.values(), ids=HOSTILE)
async def test_large_bodies_are_refused_by_the_first_thing_wrong_and_in_few_words(
    generator: ScriptedGenerator, body: bytes, told: str
) -> None:
    """Each of these held up everybody for over a second before it was refused."""
    async with in_process(generator) as http:
        response = await http.post(CHAT if b"messages" in body else COMPLETIONS, content=body)
    assert response.status_code == 400 and told in response.text
    assert len(response.content) < 3000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "def word(text):\n    return text\n" * 120_000}, 400),
        ({"prompt": "def word(text):\n    return text\n" * 120_000, "truncate_prompt_tokens": 9}, 200),
        ({"prompt": ["def word(text):" * 500] * 256}, 400),
        ({"prompt": [[1]] * 1_000_000}, 413),
        ({"prompt": [1] * 2_000_000}, 413),
        ({"prompt": ['"'] * 700_000}, 413),
        ({"prompt": "x", "user": "[:{," * 1_000_000}, 400),
    ],
    ids=["text", "cut", "texts", "lists", "ids", "strings", "marks in a text"],
)
@pytest.mark.usefixtures("no_collection")
async def test_no_body_holds_the_event_loop(generator: ScriptedGenerator, body: dict[str, Any], status: int) -> None:
    """50 ms of CPU time on an idle core; here twice that, for cores that are shared."""
    data = json.dumps(body).encode()
    longest_s, before_s = 0.0, time.thread_time()
    async with in_process(generator) as http:
        call = asyncio.create_task(http.post(COMPLETIONS, content=data, headers={"content-type": "application/json"}))
        while not call.done():
            before_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before_s)
    assert (await call).status_code == status, (await call).text
    assert longest_s < 0.1
