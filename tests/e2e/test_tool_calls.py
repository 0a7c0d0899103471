"""Calls and reasoning of a form of each kind, under every way of drafting: streamed, whole and plain answers are equal.

The model is scripted: it writes what its family writes, in tokens of four characters, so that marks and calls are cut
anywhere. It is its own draft: whole calls are accepted in one round.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from gateway.tools.call_families import BY_PARSER
from gateway.tools.reasoning import REASONING_BY_PARSER
from tests.clients import scripted
from tests.stack import Stack, gateway_beside, running
from tests.unit.gateway.tools.answers import SCHEMA, Call, objects, written

CALLS: list[Call] = [
    ("weather", '{"city": "Rome", "days": 3, "note": "a </think> \\"tag\\"\\n<tool_call> in it", "is_set": true}'),
    ("add-2", '{"rate": 2.5, "tags": ["東京 🍐", ""], "where": {"x": [1, null]}}'),
]
THOUGHT = "Both are wanted: Rome's weather, and a sum."
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "add-2", "other")
]
FORMS = {"hermes": "think", "qwen3_coder": "think", "openai": "openai", "pythonic": "mistral"}
"""The parser of reasoning, by that of calls: JSON, XML, harmony, pythonic."""
MARKED = "pythonic"
"""The form whose marks of reasoning are special tokens."""
DRAFTED: dict[str, dict[str, Any]] = {
    "model": {"speculation": {"num_draft_tokens": 8}},
    "tree": {"speculation": {"tree": "3x2x2"}},
    "ngram": {"speculation": {"num_draft_tokens": 8, "drafter": "ngram"}},
    "prediction": {"speculation": {"num_draft_tokens": 16, "drafter": "prediction"}},
}


def text_of(form: str) -> str:
    begin, end = REASONING_BY_PARSER[FORMS[form]].marks
    return f"{begin}{THOUGHT}{end}{written(BY_PARSER[form], CALLS)}"


@dataclass(frozen=True)
class Served:
    stack: Stack
    urls: dict[str, str]
    """By form."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("scripted")
    scripted.make(folder, {form: [text_of(form)] for form in FORMS}, REASONING_BY_PARSER[FORMS[MARKED]].marks)
    first, *others = (("--tool-call-parser", form, "--reasoning-parser", FORMS[form]) for form in FORMS)
    with ExitStack() as opened:
        stack = opened.enter_context(running(str(folder), str(folder), gateway_args=first))
        gateways = [stack.gateway, *(opened.enter_context(gateway_beside(stack, *args)) for args in others)]
        yield Served(stack, {form: f"http://{each.ready['http']}" for form, each in zip(FORMS, gateways, strict=True)})


def told_of(message: Any) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.content or None, getattr(message, "reasoning_content", None), objects(calls)


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_with_calls_is_the_same_streamed_whole_and_plain(served: Served, form: str) -> None:
    asked: dict[str, Any] = {
        "model": served.stack.model,
        "messages": [{"role": "user", "content": f"The task of {form}. As in: {written(BY_PARSER[form], CALLS)}"}],
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 1000,
    }
    expected = (None, THOUGHT, [(name, json.loads(text)) for name, text in CALLS])
    with openai.OpenAI(base_url=f"{served.urls[form]}/v1", api_key="any", max_retries=0) as client:
        plain = client.chat.completions.create(**asked, extra_body={"speculation": {"enabled": False}})
        assert told_of(plain.choices[0].message) == expected
        assert plain.choices[0].finish_reason == "tool_calls"
        for name, extra in DRAFTED.items():
            if name == "prediction":
                extra = extra | {"prediction": {"type": "content", "content": written(BY_PARSER[form], CALLS)}}
            whole = client.chat.completions.create(**asked, extra_body=extra)
            assert told_of(whole.choices[0].message) == expected, name
            with client.chat.completions.stream(
                **asked, extra_body=extra, stream_options={"include_usage": True}
            ) as events:
                streamed = events.get_final_completion()
            assert told_of(streamed.choices[0].message) == expected, name
            for answer in (whole, streamed):
                assert answer.choices[0].finish_reason == "tool_calls"
                usage: Any = answer.usage
                assert usage.completion_tokens == plain.usage.completion_tokens  # type: ignore[union-attr]
                details = usage.completion_tokens_details
                assert 0 < details.reasoning_tokens < usage.completion_tokens
                num_accepted = usage.speculation["num_accepted_tokens"]
                least = usage.completion_tokens / 2
                if name in ("ngram", "prediction"):  # what they draft has the tokenizer's tokens, the script has others
                    least = 0
                assert num_accepted > least, name


@pytest.mark.parametrize("form", FORMS)
def test_a_required_call_is_in_the_familys_form_and_of_the_schema_under_drafts(served: Served, form: str) -> None:
    """The schema leaves no room for what the script says: the model is led from token to token."""
    schema = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["kelvin", "celsius"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": f"The task of {form}."}],
        "tools": [{"type": "function", "function": {"name": "forecast", "parameters": schema, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "forecast"}},
        "temperature": 0,
        "max_tokens": 1000,
    }
    answers = []
    with httpx.Client(base_url=served.urls[form], timeout=60) as http:
        for extra in ({"speculation": {"enabled": False}}, DRAFTED["model"], DRAFTED["tree"]):
            answer = http.post("/v1/chat/completions", json=body | extra)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            answers.append(told_of(openai.types.chat.ChatCompletionMessage.model_validate(choice["message"])))
    assert answers[0] == answers[1] == answers[2]
    content, _, ((name, arguments),) = answers[0]
    assert (content, name) == (None, "forecast")
    jsonschema.validate(arguments, schema)


def test_a_budget_ends_the_reasoning_at_the_same_token_whatever_drafts(served: Served) -> None:
    num_tokens = 5
    body = {
        "messages": [{"role": "user", "content": f"The task of {MARKED}."}],
        "tools": TOOLS,
        "thinking_token_budget": num_tokens,
        "prediction": {"type": "content", "content": written(BY_PARSER[MARKED], CALLS)},
        "temperature": 0,
        "max_tokens": 1000,
    }
    expected = (None, THOUGHT[: 4 * num_tokens].rstrip(), [(name, json.loads(text)) for name, text in CALLS])
    counted = set()
    with httpx.Client(base_url=served.urls[MARKED], timeout=60) as http:
        for extra in ({"speculation": {"enabled": False}}, *DRAFTED.values()):
            answer = http.post("/v1/chat/completions", json=body | extra)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            told = told_of(openai.types.chat.ChatCompletionMessage.model_validate(choice["message"]))
            assert told == expected, extra
            usage = answer.json()["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == num_tokens + 2, "with the two marks"
            counted.add(usage["completion_tokens"])
    assert len(counted) == 1
