"""The body of OpenAI's POST /v1/responses, and the conversion of its input to chat messages."""

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

from gateway.admission.request_checks import MAX_MESSAGES, MAX_USER_CHARS
from gateway.admission.unchecked_request import FieldNames, UncheckedRequest
from gateway.api.layers.responses_options import (
    RESPONSES_IGNORED,
    RESPONSES_NEUTRAL,
    Include,
    ReasoningBody,
    TextBody,
    TextFormat,
)
from gateway.api.layers.responses_tools import AnyResponsesTool, OfferedTool, full_name, offered_tools
from gateway.api.schemas.base import LenientSchema, described, log_ignored
from gateway.api.schemas.content_parts import CONTENT, read_content
from gateway.api.schemas.layers import Layer, chat_message
from gateway.api.schemas.messages import CUSTOM_INPUT, MessageBody, type_field, written_arguments
from gateway.api.schemas.other_parameters import other_parameters, without_others
from gateway.confined.template_shape import text_of_content
from gateway.output_format import OutputFormat
from gateway.tools.offer import MAX_LISTED_TOOLS, offer_of
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import LOGPROBS


class ResponsesInputMessage(LenientSchema):
    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Any = Field(json_schema_extra=CONTENT)

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any, info: ValidationInfo) -> Any:
        return read_content(value, info.data.get("role", "user"))


class InputCall(LenientSchema):
    """Input item that is a past call of a function (with JSON arguments) or a custom tool (with any text as input)."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = described("of the tool, where it is in one")
    arguments: Any = Field(default=None, description="of function_call: a string of JSON")
    input: str | None = described("of custom_tool_call")

    def written(self) -> str:
        """Return the call's arguments as text. Raises ValueError if they cannot be written as JSON."""
        if self.type == "custom_tool_call":
            return written_arguments({CUSTOM_INPUT: self.input or ""})
        return written_arguments(self.arguments)

    @model_validator(mode="after")
    def _can_be_written(self) -> InputCall:
        self.written()
        return self


class InputCallOutput(LenientSchema):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Any = Field(default="", json_schema_extra=CONTENT)

    @field_validator("output", mode="before")
    @classmethod
    def _read_output(cls, value: Any) -> Any:
        return read_content(value, "tool")


class InputReasoning(LenientSchema):
    type: Literal["reasoning"]
    content: Any = Field(default="", json_schema_extra=CONTENT)

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        return text_of_content(read_content(value, "assistant"))


ITEM_TAGS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "custom_tool_call": "<call>",
    "custom_tool_call_output": "<output>",
    "reasoning": "<reasoning>",
}
"""For each type of input item that is read, the pydantic tag of its class in the union `Item`."""
LEFT_OUT = re.compile("(_call|_output)$|^mcp_")
"""Regular expression for the other types of input items: calls of tools that this server does not have, and results of
such calls. They are left out."""


class InputLeftOut(LenientSchema):
    """Input item that is a call, or the result of a call, of a tool that this server does not have.

    The item is left out of the chat that the model sees.
    """

    type: str = Field(json_schema_extra={"pattern": LEFT_OUT.pattern, "not": {"enum": list(ITEM_TAGS)}})

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {"type": value["type"]}


def _item_tag(value: Any) -> str:
    kind = type_field(value)
    if isinstance(value, dict):
        kind = kind or "message"
    if isinstance(kind, str) and kind in ITEM_TAGS:
        return ITEM_TAGS[kind]
    if isinstance(kind, str) and LEFT_OUT.search(kind):
        return "<left out>"
    # Not left to pydantic, whose error does not name the type.
    raise InvalidRequest(
        f"input has an item of type {str(kind)[:80]!r}; read here are {', '.join(ITEM_TAGS)}, and calls of other tools "
        "are left out",
        param="input",
    )


Item = Annotated[
    Annotated[ResponsesInputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<call>")]
    | Annotated[InputCallOutput, Tag("<output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[InputLeftOut, Tag("<left out>")],
    Discriminator(_item_tag),
]


class ResponsesNamedTool(TypedDict):
    type: Literal["function"]
    name: str


def read_choice(value: Any) -> str | tuple[str]:
    """Return the value of the field `tool_choice`: a word such as "auto", or `(name,)` if the value names a tool.

    Raises ValueError for any other value.
    """
    if value in ("none", "auto", "required"):
        return str(value)
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return (value["name"],)
    raise ValueError('must be none, auto, required or {"type": "function", "name": NAME}')


def as_items(value: Any) -> Any:
    """Return a string as a list with one message of the user; any other value unchanged."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value


class ResponsesBody(Layer):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra=other_parameters(RESPONSES_NEUTRAL, RESPONSES_IGNORED))

    input: Annotated[
        list[Item],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(as_items, json_schema_input_type=str | list[Item]),
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
            Any,
            BeforeValidator(
                read_choice, json_schema_input_type=Literal["none", "auto", "required"] | ResponsesNamedTool
            ),
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
        return without_others(value, RESPONSES_NEUTRAL, RESPONSES_IGNORED)

    @cached_property
    def offered(self) -> dict[str, OfferedTool]:
        """The tools that the model may call, by the name with which the model calls them.

        Raises InvalidRequest if two tools have the same name.
        """
        by_name: dict[str, OfferedTool] = {}
        for offered in offered_tools(self.tools or ()):
            name = offered.tool.name
            if name in by_name:
                text = f"{offered.path}.name is {name!r}, as that of {by_name[name].path}; name each tool once"
                raise InvalidRequest(text, param=f"{offered.path}.name")
            by_name[name] = offered
        return by_name

    @property
    def logprobs(self) -> bool:
        """Whether the request asks for log-probs of the response's text."""
        return "message.output_text.logprobs" in (self.include or ())

    def unchecked_request(self, request_id: str) -> UncheckedRequest:
        """Return the request, not yet tokenized, for one output. Raises InvalidRequest for fields that are invalid."""
        if self.top_logprobs and not self.logprobs:
            text = "top_logprobs needs include to have message.output_text.logprobs"
            raise InvalidRequest(text, param="top_logprobs")
        return self.unchecked_chat_request(
            request_id,
            list(chat_messages(self.instructions, self.input)),
            offer_of([offered.tool for offered in self.offered.values()], self.tool_choice, self.parallel_tool_calls),
            FieldNames(prompt="input", max_tokens="max_output_tokens", num_logprobs="top_logprobs"),
            self._output_format(),
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.effort,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            user=self.user,
            safety_identifier=self.safety_identifier,
        )

    @property
    def effort(self) -> str | None:
        """Reasoning effort, which the chat template gets as a variable; None if the request has no reasoning effort."""
        if self.reasoning is None:
            return None
        return self.reasoning.effort

    @property
    def text_format(self) -> TextFormat | None:
        """Field `text.format` of the request; None without it."""
        if self.text is None:
            return None
        return self.text.format

    def _output_format(self) -> OutputFormat | None:
        if self.text_format is None:
            return None
        return self.text_format.output()


def chat_messages(instructions: str | None, items: Sequence[Any]) -> Iterator[MessageBody]:
    """Yield the chat messages that a request's instructions and input items become.

    Consecutive items of the assistant become one message if they are in this order: at most one reasoning, at most one
    text, any number of tool calls.
    """
    # reasoning, text, call, call: one message. call, text: two messages.
    if instructions is not None:
        yield chat_message(role="system", content=instructions)
    elif not items:
        yield chat_message(role="user", content="")
    pending: dict[str, Any] = {}  # of a message of the assistant to which the next items may add
    for item in items:
        if _is_ignored(item):
            continue
        added = _assistant_field(item)
        if pending and (added is None or _begins_message(pending, added[0])):
            yield _assistant_message(pending)
            pending = {}
        if added is not None:
            name, value = added
            if name == "tool_calls":
                value = pending.get("tool_calls", []) + value
            pending[name] = value
        elif isinstance(item, InputCallOutput):
            yield chat_message(role="tool", tool_call_id=item.call_id, content=item.output)
        else:
            yield chat_message(role=item.role, content=item.content)
    if pending:
        yield _assistant_message(pending)


def _is_ignored(item: Any) -> bool:
    if isinstance(item, InputLeftOut):
        log_ignored(f"items of type {item.type[:80]!r}")
        return True
    # Reasoning without text is what other servers have encrypted or summarised.
    return isinstance(item, InputReasoning) and not item.content


def _assistant_field(item: Any) -> tuple[str, Any] | None:
    """Return the field that an item adds to a message of the assistant; None for an item of another role."""
    if isinstance(item, InputReasoning):
        return "reasoning_content", item.content
    if isinstance(item, InputCall):
        function = {"name": full_name(item.namespace, item.name), "arguments": item.written()}
        return "tool_calls", [{"id": item.call_id, "function": function}]
    if isinstance(item, ResponsesInputMessage) and item.role == "assistant":
        return "content", item.content
    return None


ORDER = ("reasoning_content", "content", "tool_calls")
"""Fields of an assistant's message, in the order in which a model writes them."""


def _begins_message(pending: dict[str, Any], name: str) -> bool:
    if name in pending and name != "tool_calls":
        return True
    later = ORDER[ORDER.index(name) + 1 :]
    return not pending.keys().isdisjoint(later)


def _assistant_message(fields: dict[str, Any]) -> MessageBody:
    if "tool_calls" in fields:
        return chat_message(role="assistant", **fields)
    return chat_message(role="assistant", **{"content": "", **fields})
