"""The bodies of POST /v1/messages and /v1/messages/count_tokens, Anthropic's, and the chat that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from gateway.admission.requests import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_USER_CHARS, Demand, FieldNames
from gateway.api.layer_schemas import Layer, Lenient, chat_message
from gateway.api.schemas import AnySchema, MessageBody, Strict, Strings, described, other_parameters, without_others
from gateway.output_format import OutputFormat
from gateway.tools.offer import MAX_TOOLS, MAX_TOOLS_BYTES, Tool, ToolOffer, offer_of
from outrider.wire.errors import InvalidRequest

MESSAGES_IGNORED = {
    "cache_control": "prefixes are found by their tokens, and kept until the memory is needed",
    "context_management": "nothing of a chat is cleared",
    "service_tier": "there is one",
    "inference_geo": "there is one",
    "speed": "there is one",
    "diagnostics": "nothing is stored",
    "user_profile_id": "nothing is stored",
    "workspace_id": "nothing is stored",
}
MESSAGES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}
"""What is not offered, with the values that ask for nothing."""
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def block_kind(value: Any) -> str:
    """Raises InvalidRequest for a block that is not read here: pydantic's own error would not say of which type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind not in BLOCKS:
        shown = ", ".join(BLOCKS)
        raise InvalidRequest(f"messages has a block of type {kind!r}; read here are {shown}", param="messages")
    return f"<{kind}>"


Ignored = Annotated[Any, Field(default=None, description="ignored")]


class TextBlock(Lenient):
    type: Literal["text"]
    text: str
    cache_control: Ignored
    citations: Ignored


Texts = Annotated[
    list[TextBlock],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored
    cache_control: Ignored


class RedactedBlock(Lenient):
    type: Literal["redacted_thinking"]
    data: Ignored


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored
    caller: Ignored

    def written(self) -> str:
        """Return the input as JSON. Raises InvalidRequest."""
        try:
            return orjson.dumps(self.input).decode()
        except TypeError as error:  # too deep
            raise InvalidRequest(f"a tool_use has an input that cannot be written: {error}", param="messages") from None


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = described("text")
    is_error: Annotated[Any, Field(default=None, description="ignored: the text says it")]
    cache_control: Ignored


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(block_kind),
]
_FITS = {"user": ("text", "tool_result"), "system": ("text",), "assistant": BLOCKS[:-1]}


class InputMessage(Lenient):
    """A message, or an answer as it came, which has more fields."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(as_blocks, json_schema_input_type=str | list[Block]),
    ]

    @model_validator(mode="after")
    def _fits_role(self) -> InputMessage:
        for block in self.content:
            if block.type not in _FITS[self.role]:
                raise ValueError(f"has role {self.role} and a block of type {block.type}, which do not go together")
        return self

    def messages(self) -> Iterator[MessageBody]:
        """Yield the chat's messages: results of tools are messages of their own."""
        if self.role == "assistant":
            yield self._assistant()
            return
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                if texts:
                    yield chat_message(role="user", content="\n".join(texts))
                    texts = []
                yield chat_message(role="tool", tool_call_id=block.tool_use_id, content=joined(block.content or ()))
            elif isinstance(block, TextBlock):
                texts.append(block.text)
        if texts or not self.content:
            yield chat_message(role="user" if self.role == "user" else "system", content="\n".join(texts))

    def _assistant(self) -> MessageBody:
        told: dict[str, Any] = {}
        calls = [
            {"id": each.id, "function": {"name": each.name, "arguments": each.written()}}
            for each in self.content
            if isinstance(each, ToolUseBlock)
        ]
        texts = joined([each for each in self.content if isinstance(each, TextBlock)])
        thinking = "\n".join(each.thinking for each in self.content if isinstance(each, ThinkingBlock))
        if texts or not calls:
            told["content"] = texts
        if calls:
            told["tool_calls"] = calls
        if thinking:
            told["reasoning_content"] = thinking
        return chat_message(role="assistant", **told)


def joined(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(each.text for each in blocks)


class MessagesTool(Lenient):
    type: Literal["custom"] | None = described("no tools of Anthropic's own")
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of an object")
    strict: bool | None = described("as chat's. Default: false")
    cache_control: Ignored
    eager_input_streaming: Ignored
    input_examples: Ignored

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema, bool(self.strict), "input_schema")


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = described("of the tool, with type tool")
    disable_parallel_tool_use: bool | None = described("at most one call. Default: false")

    def offer(self, tools: Sequence[Tool]) -> ToolOffer:
        """Raises InvalidRequest."""
        if (self.type == "tool") is (self.name is None):
            text = f"tool_choice has type {self.type} and {'no ' * (self.name is None)}name; they go together"
            raise InvalidRequest(text, param="tool_choice.name")
        choice = {"any": "required", "tool": (self.name,)}.get(self.type, self.type)
        return offer_of(tools, choice, not self.disable_parallel_tool_use)


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = described("ignored: reasoning ends where the model ends it")
    display: Literal["summarized", "omitted"] | None = described("ignored: reasoning comes as it is")


class JsonOutput(Strict):
    type: Literal["json_schema"]
    schema_: AnySchema = Field(alias="schema", description="a JSON Schema (2020-12)")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = described(
        "passed to the template as `reasoning_effort`, max as xhigh"
    )
    format: JsonOutput | None = described("what the answer has to be")


class Metadata(Strict):
    user_id: str | None = described("as chat's `user`", maxLength=MAX_USER_CHARS)


class CountBody(Layer):
    """POST /v1/messages/count_tokens: what a message is made of, without what says how it is answered."""

    model_config = ConfigDict(json_schema_extra=other_parameters(MESSAGES_NEUTRAL, MESSAGES_IGNORED))

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description=f"at most {MAX_MESSAGES}, the last one the user's; text, or blocks {', '.join(BLOCKS)}"
    )
    system: Texts | None = described("a string, or text blocks, joined by newlines")
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = described(
        f"at most {MAX_TOOLS} of different names, {MAX_TOOLS_BYTES >> 10} KiB in all; none of Anthropic's own"
    )
    tool_choice: ToolChoice | None = described("`type` auto, any, tool (with a `name`) or none. Default: auto")
    thinking: Thinking | None = described("passed to the chat template as `enable_thinking`. Default: the template's")
    output_config: OutputConfig | None = described("`effort`, and `format`: json_schema with a `schema`")

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, value: Any) -> Any:
        """Raises InvalidRequest naming what is not offered and asks for something."""
        return without_others(value, MESSAGES_NEUTRAL, MESSAGES_IGNORED)

    def demand(self, request_id: str, **others: Any) -> Demand:
        """Raises InvalidRequest."""
        if self.messages[-1].role == "assistant":
            text = "messages ends with the assistant's own, which is not continued here; end with the user's"
            raise InvalidRequest(text, param="messages")
        messages = [] if self.system is None else [chat_message(role="system", content=joined(self.system))]
        for each in self.messages:
            messages += each.messages()
        tools = [each.tool() for each in self.tools or ()]
        config = self.output_config or OutputConfig()
        output = None
        if config.format is not None:
            output = OutputFormat("json", config.format.schema_, "output_config.format.schema")
        return self.chat_demand(
            request_id,
            messages,
            (self.tool_choice or ToolChoice(type="auto")).offer(tools),
            FieldNames(prompt="messages", stop="stop_sequences"),
            output,
            reasoning_effort="xhigh" if config.effort == "max" else config.effort,
            **others,
        )

    def template_variables(self) -> dict[str, Any]:
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return thinks | (self.chat_template_kwargs or {})


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(
        description="at least 1; reasoning included. More than the context leaves means what it leaves, as chat's",
        json_schema_extra={"minimum": 1},
    )
    stop_sequences: Annotated[Strings, Field(max_length=MAX_STOPS)] | None = described(
        f"up to {MAX_STOPS}, each of 1 to {MAX_STOP_CHARS} characters; as chat's `stop`"
    )
    stop_in_reasoning: bool | None = described("as chat's. Default: false")
    metadata: Metadata | None = described("`user_id`: as chat's `user`")

    def demand(self, request_id: str, **others: Any) -> Demand:
        """Raises InvalidRequest."""
        user = None if self.metadata is None else self.metadata.user_id
        asked = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stop_in_reasoning": self.stop_in_reasoning,
            "user": user,
        }
        return super().demand(request_id, **asked, **others)
