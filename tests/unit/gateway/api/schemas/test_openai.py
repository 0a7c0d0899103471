"""Bodies to Demands: defaults, odd forms, and a document that lists exactly what is read."""

from typing import Any

import pytest

from gateway.admission.prompts import Chat
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.layers.messages_schemas import MessagesBody
from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.schemas.openai import ChatBody, CompletionBody
from gateway.api.schemas.other_parameters import NEUTRAL
from gateway.api.schemas.parsing import parse_body
from gateway.generation import SpeculationOptions
from gateway.output_format import OutputFormat
from gateway.tools.reading import ReasoningBudget
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import SamplingParams
from tests.openai_table import DOCUMENT, written


def completion(**body: Any) -> UncheckedRequest:
    return parse_body(CompletionBody, {"prompt": "x", **body}).unchecked_request("cmpl-1")


def chat(**body: Any) -> UncheckedRequest:
    return parse_body(ChatBody, {"messages": [{"role": "user", "content": "x"}], **body}).unchecked_request(
        "chatcmpl-1"
    )


def test_defaults_are_openais() -> None:
    demand = completion()
    assert demand.params == SamplingParams(temperature=1.0)
    assert (demand.max_tokens, demand.num_choices, demand.seed, demand.stop) == (16, 1, None, ())
    assert demand.speculation == SpeculationOptions()
    assert chat().max_tokens is None
    assert chat().prompts == (Chat(({"role": "user", "content": "x"},)),)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3))), ([[]], ((),))],
)
def test_the_four_forms_of_a_prompt(given: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=given).prompts == prompts


def test_layers_are_scheduled_as_chats_are() -> None:
    asked: Any = {"priority": -2, "max_tpot_ms": 5}
    message = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    layers: list[Any] = [parse_body(ResponsesBody, {"input": "x", **asked}), parse_body(MessagesBody, message | asked)]
    for demand in (chat(**asked), *(layer.unchecked_request("id") for layer in layers)):
        assert (demand.priority, demand.max_tpot_ms) == (-2, 5.0)


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat("json_object", None, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}},
            OutputFormat("json", {}, "response_format.json_schema.schema", strict=True),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"description": "d", "schema": True}}},
            OutputFormat("json", True, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": "{}"}}, OutputFormat("json", "{}", "structured_outputs.json")),
        (
            {
                "structured_outputs": {"regex": "a", "json": None, "json_object": False},
                "response_format": {"type": "text"},
            },
            OutputFormat("regex", "a", "structured_outputs.regex"),
        ),
        ({"structured_outputs": {"choice": ["a"]}}, OutputFormat("choice", ["a"], "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "x"}}, OutputFormat("grammar", "x", "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json_object": True}},
            OutputFormat("json_object", True, "structured_outputs.json_object"),
        ),
    ],
)
def test_what_an_answer_has_to_be(body: dict[str, Any], output: OutputFormat | None) -> None:
    assert completion(**body).output == output
    assert chat(**body).output == output


def test_a_budget_of_reasoning_bounds_it_and_is_a_variable_of_the_template() -> None:
    (prompt,) = chat(thinking_token_budget=5).prompts
    assert isinstance(prompt, Chat)
    assert prompt.reasoning_budget == ReasoningBudget(5) and prompt.template_kwargs == {"thinking_budget": 5}
    assert chat(thinking_token_budget=-1) == chat()
    for given in (-2, 1 << 31):
        shown = f"thinking_token_budget is {given}, must be from -1 to 2147483647; -1 is any number"
        with pytest.raises(InvalidRequest, match=shown) as caught:
            chat(thinking_token_budget=given)
        assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_unsupported_parameters_are_refused_unless_they_have_no_effect(name: str) -> None:
    for value in NEUTRAL[name]:
        assert chat(**{name: value}) == chat()
    with pytest.raises(InvalidRequest, match="not offered") as caught:
        chat(**{name: {"anything": 1}})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("text", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "diff", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more"),
    ],
)
def test_no_other_form_of_a_prediction(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(prediction=given)
    assert caught.value.param == param
    assert chat(prediction=None) == chat()


def test_wrong_types_are_not_converted_and_long_values_not_echoed() -> None:
    for body in ({"temperature": "1"}, {"max_tokens": 1.5}, {"stream": 1}, {"logit_bias": {"1": "x"}}):
        with pytest.raises(InvalidRequest):
            completion(**body)
    with pytest.raises(InvalidRequest) as caught:
        completion(max_tokens="9" * 100_000)
    assert len(caught.value.message) < 200


def test_the_document_has_the_tables_of_the_models() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document == written(document), "run make openai-table"
    assert document.count("| `") > 60
