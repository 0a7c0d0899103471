"""The body of POST /v1/responses, OpenAI's, and the messages and tools of the chat that it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from gateway.admission.requests import MAX_MESSAGES, MAX_USER_CHARS, Demand, FieldNames
from gateway.api.forms.responses_tools import AnyResponsesTool, OfferedTool, full_name, offered_tools
from gateway.api.schemas.base import Lenient, Strict, described, note_ignored
from gateway.api.schemas.content_parts import CONTENT, read_content
from gateway.api.schemas.layers import Layer, chat_message
from gateway.api.schemas.messages import CUSTOM_INPUT, MessageBody, written_arguments
from gateway.api.schemas.openai import JsonSchemaBody, ResponseFormatBody, other_parameters, without_others
from gateway.confined.template_shape import text_of_content
from gateway.output_format import OutputFormat
from gateway.tools.offer import MAX_LISTED_TOOLS, offer_of
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import LOGPROBS

RESPONSES_IGNORED = {
    "service_tier": "there is one",
    "prompt_cache_key": "prefixes are found by their tokens; a pair has one cache",
    "prompt_cache_retention": "kept until the memory is needed",
    "prompt_cache_options": "kept until the memory is needed",
    "stream_options": "its `include_obfuscation` is padding against traffic analysis",
    "max_tool_calls": "of tools that the server runs, and it runs none",
    "client_metadata": "nothing is stored",
}
RESPONSES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "moderation": (),
    "context_management": ([],),
    "truncation": ("disabled",),
}
"""What is not offered, with the values that ask for nothing: nothing is stored, and no input is cut."""

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputMessage(Lenient):
    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Any = Field(json_schema_extra=CONTENT)

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any, info: ValidationInfo) -> Any:
        return read_content(value, info.data.get("role", "user"))


class InputCall(Lenient):
    """A past call of a function, or of a tool that takes any text."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = described("of the tool, where it is in one")
    arguments: Any = Field(default=None, description="of function_call: a string of JSON")
    input: str | None = described("of custom_tool_call")

    def written(self) -> str:
        """Return the arguments as text. Raises ValueError."""
        if self.type == "custom_tool_call":
            return written_arguments({CUSTOM_INPUT: self.input or ""})
        return written_arguments(self.arguments)

    @model_validator(mode="after")
    def _can_be_written(self) -> InputCall:
        self.written()
        return self


class InputCallOutput(Lenient):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Any = Field(default="", json_schema_extra=CONTENT)

    @field_validator("output", mode="before")
    @classmethod
    def _read_output(cls, value: Any) -> Any:
        return read_content(value, "tool")


class InputReasoning(Lenient):
    type: Literal["reasoning"]
    content: Any = Field(default="", json_schema_extra=CONTENT)

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        return text_of_content(read_content(value, "assistant"))


ITEMS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "custom_tool_call": "<call>",
    "custom_tool_call_output": "<output>",
    "reasoning": "<reasoning>",
}
"""Tags of the items that are read, by type."""


LEFT_OUT = re.compile("(_call|_output)$|^mcp_")
"""Types of items of tools that the server has not."""


class InputLeftOut(Lenient):
    """An item of a tool that the server has not: its call, or what it found. Left out of the chat."""

    type: str = Field(json_schema_extra={"pattern": LEFT_OUT.pattern, "not": {"enum": list(ITEMS)}})

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, value: Any) -> Any:
        return {"type": value["type"]} if isinstance(value, dict) else value


def _item_kind(value: Any) -> str:
    """Raises InvalidRequest for an item that is not read here: pydantic's own error would not say of which type."""
    kind = value.get("type") or "message" if isinstance(value, dict) else getattr(value, "type", None)
    if isinstance(kind, str) and kind in ITEMS:
        return ITEMS[kind]
    if isinstance(kind, str) and LEFT_OUT.search(kind):
        return "<left out>"
    raise InvalidRequest(
        f"input has an item of type {str(kind)[:80]!r}; read here are {', '.join(ITEMS)}, and calls of other tools are "
        "left out",
        param="input",
    )


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<call>")]
    | Annotated[InputCallOutput, Tag("<output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[InputLeftOut, Tag("<left out>")],
    Discriminator(_item_kind),
]


class NamedTool(TypedDict):
    type: Literal["function"]
    name: str


def read_choice(value: Any) -> str | tuple[str]:
    """Return the word, or the name of a tool in brackets."""
    if value in ("none", "auto", "required"):
        return str(value)
    name = value.get("name") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(name, str):
        raise ValueError('must be none, auto, required or {"type": "function", "name": NAME}')
    return (name,)


class TextFormat(JsonSchemaBody):
    """OpenAI's `text.format`: chat's `response_format`, with its `json_schema` unpacked."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Any = Field(default=None, alias="schema", description="a JSON Schema (2020-12), with type json_schema")

    def output(self) -> OutputFormat | None:
        """Raises InvalidRequest."""
        if (self.type == "json_schema") is (self.schema_ is None):
            text = f"text.format has type {self.type} and {'no ' * (self.schema_ is None)}schema; they go together"
            raise InvalidRequest(text, param="text.format")
        if self.type == "json_schema":
            return OutputFormat("json", self.schema_, "text.format.schema", bool(self.strict))
        found = ResponseFormatBody(type=self.type).output()
        return None if found is None else OutputFormat(found.kind, found.value, "text.format")


class TextBody(Strict):
    format: TextFormat | None = described("what the answer has to be")
    verbosity: Literal["low", "medium", "high"] | None = described("ignored: models here are not told of it")


class ReasoningBody(Lenient):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = described("as chat's")
    summary: Literal["auto", "concise", "detailed"] | None = described("ignored: reasoning comes as it is")
    generate_summary: Literal["auto", "concise", "detailed"] | None = described("ignored, as `summary`")


def one_or_many(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(Layer):
    """POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra=other_parameters(RESPONSES_NEUTRAL, RESPONSES_IGNORED))

    input: Annotated[
        list[Item],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(one_or_many, json_schema_input_type=str | list[Item]),
    ] = Field(
        description=f"a string, or at most {MAX_MESSAGES} items: messages of text, `function_call`, "
        "`function_call_output`, `custom_tool_call`, `custom_tool_call_output` and `reasoning`, as answers have them; "
        "calls of other tools are left out"
    )
    instructions: str | None = described("a system message in front of the input")
    max_output_tokens: int | None = described("reasoning included. Default: what the context leaves", minimum=1)
    tools: Annotated[list[AnyResponsesTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = described(
        "`function`, `custom`, and `namespace` of these, of different names, at most `--max-tools`, of "
        "`--max-tools-bytes` in all; OpenAI's own are left out"
    )
    tool_choice: (
        Annotated[
            Any, BeforeValidator(read_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool)
        ]
        | None
    ) = described('none, auto, required, or `{"type": "function", "name": NAME}`. Default: auto')
    parallel_tool_calls: bool | None = described("whether an answer may hold several calls. Default: true")
    text: TextBody | None = described(
        "`format`: text, json_object, or json_schema with a `schema` and `strict`; `verbosity` is ignored"
    )
    reasoning: ReasoningBody | None = described("`effort`: passed to the chat template")
    include: list[Include] | None = described(
        "`message.output_text.logprobs` is honoured, and others ask for nothing that there is"
    )
    top_logprobs: int | None = described("with the log-probs that `include` asks for. Default: 0", LOGPROBS)
    metadata: dict[str, str] | None = described("told in the answer; nothing is stored")
    user: str | None = described("as chat's", maxLength=MAX_USER_CHARS)
    safety_identifier: str | None = described("as chat's", maxLength=MAX_USER_CHARS)

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, value: Any) -> Any:
        """Raises InvalidRequest naming what is not offered and asks for something."""
        return without_others(value, RESPONSES_NEUTRAL, RESPONSES_IGNORED)

    @cached_property
    def offered(self) -> dict[str, OfferedTool]:
        """Return the tools that the model is offered, by the names that it calls them by. Raises InvalidRequest."""
        found: dict[str, OfferedTool] = {}
        for each in offered_tools(self.tools or ()):
            name = each.tool.name
            if name in found:
                text = f"{each.place}.name is {name!r}, as that of {found[name].place}; name each tool once"
                raise InvalidRequest(text, param=f"{each.place}.name")
            found[name] = each
        return found

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def demand(self, request_id: str) -> Demand:
        """Raises InvalidRequest."""
        if self.top_logprobs and not self.logprobs:
            text = "top_logprobs needs include to have message.output_text.logprobs"
            raise InvalidRequest(text, param="top_logprobs")
        names = FieldNames(prompt="input", max_tokens="max_output_tokens", num_logprobs="top_logprobs")
        return self.chat_demand(
            request_id,
            list(messages_of(self.instructions, self.input)),
            offer_of([each.tool for each in self.offered.values()], self.tool_choice, self.parallel_tool_calls),
            names,
            None if self.text is None or self.text.format is None else self.text.format.output(),
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            user=self.user,
            safety_identifier=self.safety_identifier,
        )


def messages_of(instructions: str | None, items: Sequence[Any]) -> Iterator[MessageBody]:
    """Yield the chat's messages. An assistant's reasoning, text and calls that follow each other are one of them."""
    if instructions is not None:
        yield chat_message(role="system", content=instructions)
    elif not items:
        yield chat_message(role="user", content="")
    turn: dict[str, Any] = {}
    for item in items:
        if isinstance(item, InputLeftOut):
            note_ignored(f"items of type {item.type[:80]!r}")
            continue
        if isinstance(item, InputReasoning) and not item.content:
            continue  # what others have encrypted or summarised
        added = _of_assistant(item)
        if turn and (not added or _begins_anew(turn, added)):
            yield _assistant(turn)
            turn = {}
        if added is not None:
            calls = [*turn.get("tool_calls", ()), *added.pop("tool_calls", ())]
            turn |= added | ({"tool_calls": calls} if calls else {})
        elif isinstance(item, InputCallOutput):
            yield chat_message(role="tool", tool_call_id=item.call_id, content=item.output)
        else:
            yield chat_message(role=item.role, content=item.content)
    if turn:
        yield _assistant(turn)


def _of_assistant(item: Any) -> dict[str, Any] | None:
    """Return what an item adds to a message of the assistant, None for one of another role."""
    if isinstance(item, InputReasoning):
        return {"reasoning_content": item.content}
    if isinstance(item, InputCall):
        function = {"name": full_name(item.namespace, item.name), "arguments": item.written()}
        return {"tool_calls": [{"id": item.call_id, "function": function}]}
    return {"content": item.content} if isinstance(item, InputMessage) and item.role == "assistant" else None


def _begins_anew(turn: dict[str, Any], added: dict[str, Any]) -> bool:
    """Whether the order of reasoning, text and calls says that another message begins."""
    order = ("reasoning_content", "content", "tool_calls")
    (name,) = added
    return (name in turn and name != "tool_calls") or any(each in turn for each in order[order.index(name) + 1 :])


def _assistant(turn: dict[str, Any]) -> MessageBody:
    return chat_message(role="assistant", **({"content": ""} if "tool_calls" not in turn else {}) | turn)
