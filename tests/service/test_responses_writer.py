"""/v1/responses as the official client reads it; a scripted generator says what the model would."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.layers.responses_writer import ResponseWriter
from gateway.api.openai_responses import join_outputs
from gateway.api.schemas.parsing import parse_body
from gateway.api.speculation_answers import speculation_of
from outrider.wire.errors import WorkerLost
from tests.service.front_door import in_process
from tests.service.scripted_generator import ScriptedGenerator, rounds
from tests.service.test_http_tools import CALLS, FOUND, TOOL, Weather, client_of, generator_of
from tests.service.test_routes import MODEL

PATH = "/v1/responses"
FUNCTION: Any = {"type": "function", "name": "Weather", "parameters": TOOL["function"]["parameters"], "strict": True}
REASONED = "The user asks.\n</think>\n\n" + CALLS
ASKED: Any = {"model": MODEL, "input": "Weather?"}


def prompt_of(generator: ScriptedGenerator) -> str:
    return generator.own_tokenizer.decode(generator.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_a_text_is_one_message_and_what_was_asked_is_told() -> None:
    generator = generator_of("the quick brown fox")
    generator.num_cached = 3
    async with client_of(generator) as client:
        answer = await client.responses.create(
            **ASKED, instructions="Be brief.", max_output_tokens=90, temperature=0.5, metadata={"a": "b"}, store=False
        )
    assert (answer.status, answer.output_text) == ("completed", generator.text)
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage) and message.status == "completed"
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (answer.max_output_tokens, answer.tool_choice, answer.model) == (90, "auto", MODEL)
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.input_tokens == len(generator.requests[0].prompt_ids)
    assert answer.usage.output_tokens == len(generator.own_tokenizer.encode(generator.text))
    assert prompt_of(generator).index("Be brief.") < prompt_of(generator).index("Weather?")


async def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    async with client_of(generator_of(REASONED, "reasoning")) as client:
        answer = await client.responses.parse(**ASKED, tools=[FUNCTION])
    reasoning, message, first, second = answer.output
    assert isinstance(reasoning, ResponseReasoningItem) and reasoning.content is not None
    assert [each.text for each in reasoning.content] == ["The user asks."]
    assert answer.output_text == "Let me see." and message.type == "message"
    for item, found in zip((first, second), FOUND, strict=True):
        assert isinstance(item, ResponseFunctionToolCall)
        assert (item.name, json.loads(item.arguments)) == ("Weather", found)
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 3


async def test_the_events_come_in_openais_order_and_add_up() -> None:
    async with client_of(generator_of(REASONED, "reasoning")) as client:
        async with client.responses.stream(**ASKED, tools=[FUNCTION]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(**ASKED, tools=[FUNCTION])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    assert kinds.count("output_text.delta") > 1 < kinds.count("function_call_arguments.delta")

    def told(response: Response) -> list[Any]:
        without = {"id", "call_id", "parsed_arguments"}
        return [item.model_dump(exclude=without, exclude_none=True) for item in response.output]

    items: list[Any] = [*final.output]
    dones = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in dones] == [item.id for item in items]
    assert [each["type"] for each in told(final)] == [each["type"] for each in told(whole)]
    assert final.output_text == whole.output_text


async def test_an_answer_at_its_limit_is_incomplete() -> None:
    async with client_of(generator_of("the quick brown fox jumps")) as client:
        answer = await client.responses.create(**ASKED, max_output_tokens=3)
        events = [event async for event in await client.responses.create(**ASKED, max_output_tokens=3, stream=True)]
    assert answer.status == "incomplete" and answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


async def test_a_stream_that_fails_says_so_in_its_last_event() -> None:
    generator = generator_of("the quick brown fox")
    generator.fail_at = (1, WorkerLost("the target is gone"))
    async with client_of(generator) as client:
        events = [event async for event in await client.responses.create(**ASKED, stream=True)]
        assert events[-1].type == "response.failed" and events[-1].response.error is not None
        assert events[-1].response.error.message == "the target is gone"
        generator.fail_at = (0, WorkerLost("the target is gone"))
        with pytest.raises(openai.InternalServerError, match="the target is gone"):
            await client.responses.create(**ASKED, stream=True)


async def test_what_a_client_sends_back_is_one_chat() -> None:
    generator = generator_of(REASONED, "reasoning")
    async with client_of(generator) as client:
        answer = await client.responses.create(**ASKED, tools=[FUNCTION])
        calls = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
        outputs: Any = [
            {"type": "function_call_output", "call_id": each.call_id, "output": f"sunny {at}"}
            for at, each in enumerate(calls)
        ]
        asked: Any = [{"role": "user", "content": "Weather?"}, *answer.output, *outputs]
        asked += [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks."}]}]
        await client.responses.create(model=MODEL, input=asked, tools=[FUNCTION])
    prompt = prompt_of(generator)
    places = [prompt.index(text) for text in ("Weather?", "Let me see.", '"Rome"', '"Paris"', "sunny 0", "Thanks.")]
    assert places == sorted(places) and prompt.count("assistant") == 2


async def test_a_format_binds_and_log_probs_are_told() -> None:
    generator = generator_of('{"city": "Rome", "days": 3}')
    async with client_of(generator) as client:
        parsed = await client.responses.parse(**ASKED, text_format=Weather)
        include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        answer = await client.responses.create(**ASKED, include=include, top_logprobs=2)
        events = [x async for x in await client.responses.create(**ASKED, include=include, stream=True)]
    assert parsed.output_parsed == Weather(city="Rome", days=3)
    assert generator.requests[0].params.grammar and not generator.requests[1].params.grammar
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage) and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert "".join(each.token for each in logprobs) == generator.text
    assert {len(each.top_logprobs) for each in logprobs} == {2}
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert "".join(each.token for each in deltas) == generator.text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [FUNCTION | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}}, "text.format.schema.$ref"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(changes: Any, param: str) -> None:
    async with in_process(generator_of("x")) as http:
        answer = await http.post(PATH, json=ASKED | changes)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param and param.partition("[")[0] in error["message"]


async def test_text_behind_a_call_has_its_own_log_probs() -> None:
    generator = generator_of(
        '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call> sorry about the quick brown fox'
    )
    asked = ASKED | {"tools": [FUNCTION], "include": ["message.output_text.logprobs"]}
    async with in_process(generator) as http:
        by_rounds = (await http.post(PATH, json=asked)).json()
    (request,) = generator.requests
    writer = ResponseWriter(parse_body(ResponsesBody, asked), "resp_1", request, generator.own_tokenizer)
    assert list(writer.push(join_outputs(rounds(generator, request)))), "the call ends and the text begins in one push"
    for answer in (by_rounds, writer.whole()):
        assert [item["type"] for item in answer["output"]] == ["function_call", "message"]
        (part,) = answer["output"][1]["content"]
        assert part["text"] == "sorry about the quick brown fox"
        assert "".join(each["token"] for each in part["logprobs"]).lstrip() == part["text"]


@pytest.mark.parametrize("cut", [False, True])
async def test_tools_are_called_by_their_own_names(cut: bool) -> None:
    calls = [("patch", {"input": 'a\n"b"'}), ("mcp__x__read", {"city": "Rome"})]
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    generator = generator_of("\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written))
    inner = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    tools: Any = [
        {"type": "custom", "name": "patch", "description": "Change a file."},
        {"type": "namespace", "name": "mcp__x", "description": "More.", "tools": [inner, {"type": "web_search"}]},
        {"type": "web_search"},
    ]
    asked = {**ASKED, "tools": tools, **({"max_output_tokens": 24} if cut else {})}
    async with client_of(generator) as client:
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    if cut:
        assert whole.output[0].type == "custom_tool_call" and whole.status == "incomplete"
        assert whole.output[0].input.startswith("{")
        return
    custom, function = whole.output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", 'a\n"b"')  # type: ignore[union-attr]
    assert (function.type, function.name, function.namespace) == ("function_call", "read", "mcp__x")  # type: ignore[union-attr]
    inputs = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [(event.type.rpartition(".")[2], getattr(event, "delta", None)) for event in inputs] == [
        ("delta", 'a\n"b"'),
        ("done", None),
    ]
    assert [tool.type for tool in whole.tools] == ["custom", "namespace"], "those that were offered"
    back = [{"role": "user", "content": "x"}, *whole.output]
    back += [{"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "done"}]  # type: ignore[union-attr]
    async with client_of(generator) as client:
        await client.responses.create(model=MODEL, input=back, tools=tools)  # type: ignore[arg-type]
    assert '"name": "mcp__x__read"' in prompt_of(generator) and "done" in prompt_of(generator)


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
async def test_each_round_of_a_layer_tells_its_tokens_kinds(path: str) -> None:
    generator = generator_of(REASONED, "reasoning")
    asked: Any = {"model": MODEL, "speculation": {"token_kinds": True}}
    if path == PATH:
        asked |= {"input": "Weather?", "tools": [FUNCTION]}
    else:
        tool = {"name": "Weather", "input_schema": FUNCTION["parameters"]}
        asked |= {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 300, "tools": [tool]}
    async with in_process(generator) as http:
        plain = (await http.post(path, json=asked | {"speculation": {}})).json()
        whole = (await http.post(path, json=asked)).json()
        lines = (await http.post(path, json=asked | {"stream": True})).text.splitlines()
    made = rounds(generator, generator.requests[-1])
    expected = [speculation_of(output, generator.own_tokenizer) for output in made]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["speculation"] for event in events if "speculation" in event] == expected
    assert whole["speculation"] == speculation_of(join_outputs(made), generator.own_tokenizer)
    assert "speculation" not in plain
    alone = [event for event in events if event["type"] in ("ping", "response.speculation") and "speculation" in event]
    assert alone and all(event["speculation"]["tokens"] for event in alone), "rounds without text are told, too"
    if path == PATH:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        async with (
            client_of(generator) as client,
            client.responses.stream(
                **ASKED, tools=[FUNCTION], extra_body={"speculation": {"token_kinds": True}}
            ) as stream,
        ):
            assert (await stream.get_final_response()).output_text == "Let me see."
