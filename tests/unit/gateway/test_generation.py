"""Answers whose tokens are scripted: however many tokens a round commits, whole or streamed, they are told alike."""

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.layers.messages_writer import MessageWriter
from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.layers.responses_writer import ResponseWriter
from gateway.api.openai_responses import ChatWriter, join_outputs
from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.generation import GenerationRequest, RoundOutput, ServedFacts
from gateway.rounds.session import Session
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from target_service.leases.lease_jobs import Finish
from target_service.step.commit import commit_tokens, kinds_of
from tests.rendering import inline_template
from tests.service.scripted_generator import TIMINGS
from tests.unit.gateway.admission.asked import built, reader_of

SPECIAL = ("<unk>", "</s>", "<|mark|>")
EOS = 1
THOUGHT = ("<think>", "Maybe ", "Question: ", "no. ", "</think>", "42")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{# <think></think><tool_call> #}"
SIZES = (1, 2, 3, 4, 9)
"""Tokens that a round commits at most: those of plain steps first."""
FINISHES = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tokenizer_of(words: Sequence[str], template: str = TEMPLATE) -> Tokenizer:
    vocab = {text: token_id for token_id, text in enumerate([*SPECIAL, *dict.fromkeys(words)])}
    data = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    data.decoder = decoders.Fuse()
    data.add_tokens([AddedToken(word, normalized=False) for word in words])
    data.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(data.to_str(), {}, inline_template(template))


async def request_of(tokenizer: Tokenizer, **fields: Any) -> GenerationRequest:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    demand: UncheckedRequest = parse_body(ChatBody, body).unchecked_request("id")
    facts = ServedFacts("m", 2048, tokenizer.vocab_size, 0, 1, None)
    own = reader_of()
    own.tokenizer = tokenizer
    (request,) = await built(demand, facts=facts, reader=own)
    return request


def rounds_of(request: GenerationRequest, tokenizer: Tokenizer, ids: Sequence[int], size: int) -> list[RoundOutput]:
    """What a target and a session make of the ids and an end of sequence, `size` a round."""
    session, outputs = Session(request, tokenizer, 1), list[RoundOutput]()
    script = [*ids, EOS, *[EOS] * size]
    while not session.is_finished:
        done = session.num_output
        token_ids, finish = commit_tokens(request.params, (EOS,), done, script[done : done + size])
        verdict = tpb.Verdict(
            committed_len=session.committed_len,
            token_ids=token_ids,
            kinds=[kind.value for kind in kinds_of(size - 1, size - 1, True)[: len(token_ids)]],
            finish_reason=FINISHES[finish],
            num_drafted=size - 1,
            num_accepted=size - 1,
        )
        outputs.append(session.apply(verdict, TIMINGS))
    return outputs


def whole(request: GenerationRequest, tokenizer: Tokenizer, outputs: list[RoundOutput]) -> dict[str, Any]:
    writer = ChatWriter(tokenizer, False, [request.reading])
    choice = writer.choice(0, join_outputs(outputs))
    usage = outputs[-1].usage
    assert usage is not None
    counts = {"tokens": usage.num_completion_tokens, "reasoning": writer.num_reasoning_tokens}
    calls = [each["function"] for each in choice["message"].get("tool_calls", ())]
    return {**choice, **counts, "message": {**choice["message"], "tool_calls": calls}}


def streamed(request: GenerationRequest, tokenizer: Tokenizer, outputs: list[RoundOutput]) -> dict[str, Any]:
    """What a client puts together."""
    writer = ChatWriter(tokenizer, False, [request.reading])
    texts = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, str]] = {}
    ending: dict[str, Any] = {}
    for index, output in enumerate(outputs):
        chunk = writer.chunk(0, output, first=index == 0) or {"delta": {}}
        for name in texts:
            texts[name] += chunk["delta"].get(name) or ""
        for call in chunk["delta"].get("tool_calls", ()):
            own = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            own["name"] += call["function"].get("name", "")
            own["arguments"] += call["function"]["arguments"]
        ending = {name: chunk.get(name) for name in ("finish_reason", "stop_reason")}
    return {**texts, **ending, "calls": list(calls.values()), "reasoning": writer.num_reasoning_tokens}


async def told(words: Sequence[str], script: Sequence[str] | None = None, **fields: Any) -> dict[str, Any]:
    """The choice that is told of a script, whichever way its tokens come."""
    tokenizer = tokenizer_of(words)
    request = await request_of(tokenizer, **fields)
    ids = [tokenizer._tokenizer.token_to_id(word) for word in script or words]
    found = []
    for size in SIZES:
        outputs = rounds_of(request, tokenizer, ids, size)
        choice = whole(request, tokenizer, outputs)
        parts, message = streamed(request, tokenizer, outputs), choice["message"]
        assert parts["content"] == (message["content"] or "")
        assert parts["reasoning_content"] == message.get("reasoning_content", "")
        assert parts["calls"] == message["tool_calls"] and parts["reasoning"] == choice["reasoning"]
        assert (parts["finish_reason"], parts["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        found.append(choice)
    assert all(each == found[0] for each in found)
    return found[0]


WHOLE = ("42", "Maybe Question: no.", "stop", None)
STOPS: list[tuple[dict[str, Any], tuple[str, str, str, str | int | None]]] = [
    ({"stop": ["Question:"]}, WHOLE),
    ({"stop": ["no. "]}, WHOLE),
    ({"stop": ["</think>"]}, WHOLE),
    ({"stop": ["k>4"]}, WHOLE),
    ({"stop": ["Maybe", "2"]}, ("4", WHOLE[1], "stop", "2")),
    ({"stop": ["2"], "include_stop_str_in_output": True}, ("42", WHOLE[1], "stop", "2")),
    ({"stop": ["42"]}, ("", WHOLE[1], "stop", "42")),
    ({"stop_token_ids": [5, 7]}, WHOLE),
    ({"stop_token_ids": [8]}, ("", WHOLE[1], "stop", 8)),
    ({"stop_token_ids": [8], "include_stop_str_in_output": True}, ("42", WHOLE[1], "stop", 8)),
    ({"stop_token_ids": [8], "min_tokens": 6}, WHOLE),
    ({"stop": ["Question:"], "max_tokens": 4}, ("", "Maybe Question: no. ", "length", None)),
    ({"stop": ["Question:"], "stop_in_reasoning": True}, ("", "Maybe ", "stop", "Question:")),
    ({"stop_token_ids": [5], "stop_in_reasoning": True}, ("", "Maybe ", "stop", 5)),
]


@pytest.mark.parametrize(("fields", "expected"), STOPS, ids=lambda value: str(value)[:60])
async def test_stops_wait_for_the_end_of_the_reasoning(
    fields: dict[str, Any], expected: tuple[str, str, str, str | int | None]
) -> None:
    choice = await told(THOUGHT, **fields)
    message = choice["message"]
    assert (
        message["content"],
        message["reasoning_content"],
        choice["finish_reason"],
        choice["stop_reason"],
    ) == expected


@pytest.mark.parametrize("stop", [["\n\n"], ["42"], ["<th"], ["never"]])
async def test_where_there_is_no_reasoning_a_stop_counts_from_the_first_character(stop: list[str]) -> None:
    script = ("\n\n", "<th", "42")
    choice = await told(script, stop=stop)
    text = "".join(script)
    assert choice["message"]["content"] == text.partition(stop[0])[0]
    assert choice["stop_reason"] == (stop[0] if stop[0] in text else None)
    begun = await told(("\n\n",), stop=["\n\n"])
    assert (begun["message"]["content"], begun["stop_reason"], begun["finish_reason"]) == ("", "\n\n", "stop")
    behind = await told(("\n\n", "<think>", "hm", "</think>", "a\n\nb"), stop=["\n\n"])
    assert (behind["message"]["content"], behind["message"]["reasoning_content"]) == ("a", "hm")
    first = await told(("42", "43"), stop_token_ids=[3])
    assert (first["message"]["content"], first["stop_reason"], first["tokens"]) == ("", 3, 1)


CALL = '{"name": "f", "arguments": {"a": "stop here"}}'
CALLED = ("<think>Let me see.</think>\n\n", "I look.<tool_call>", CALL, "\n</tool_call>\n<tool_call>\n")
CALLED_ON = (CALL.replace("here", "there"), "\n</tool_call>done")


async def test_parts_are_the_same_on_every_endpoint_however_they_come() -> None:
    words = (*CALLED, *CALLED_ON)
    choice = await told(words, tools=[TOOL])
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "I look.done")
    assert [call["arguments"] for call in message["tool_calls"]] == ['{"a": "stop here"}', '{"a": "stop there"}']
    tokenizer = tokenizer_of(words)
    request = await request_of(tokenizer, tools=[TOOL])
    ids = [tokenizer._tokenizer.token_to_id(word) for word in words]
    offered = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    asked = parse_body(ResponsesBody, {"input": "x", "tools": offered})
    kinds = []
    for size in SIZES:
        outputs = rounds_of(request, tokenizer, ids, size)
        writers = (MessageWriter(99, "id", request, tokenizer), ResponseWriter(asked, "id", request, tokenizer))
        for writer in writers:
            for output in outputs:
                list(writer.push(output))
        blocks = writers[0].whole()["content"]
        items = writers[1].whole()["output"]
        kinds.append([[each["type"] for each in blocks], [each["type"] for each in items]])
        assert [each["input"]["a"] for each in blocks if each["type"] == "tool_use"] == ["stop here", "stop there"]
        assert [each["arguments"] for each in items if each["type"] == "function_call"] == [
            call["arguments"] for call in message["tool_calls"]
        ]
    assert kinds[0][0] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert kinds[0][1] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert all(each == kinds[0] for each in kinds)


async def test_a_stop_inside_a_call_cuts_it_as_a_limit_does() -> None:
    choice = await told((*CALLED, *CALLED_ON), tools=[TOOL], stop=["there"])
    calls = choice["message"]["tool_calls"]
    assert [call["arguments"] for call in calls] == ['{"a": "stop here"}', '{"a": "stop ']
    assert choice["stop_reason"] == "there"


async def test_the_end_of_calls_that_a_limit_cuts_is_no_content() -> None:
    words = (CALLED[1].removeprefix("I look."), CALL, "\n</tool", "_call>")
    for max_tokens in (2, 3, 4):
        choice = await told(words, tools=[TOOL], max_tokens=max_tokens)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
        assert len(choice["message"]["tool_calls"]) == 1
    text = await told((words[0], CALL, "\n</other"), tools=[TOOL], max_tokens=3)
    assert text["message"]["content"] == "</other"
