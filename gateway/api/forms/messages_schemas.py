"""The bodies of POST /v1/messages and /v1/messages/count_tokens, Anthropic's, and the chat that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from gateway.admission.requests import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_USER_CHARS, Demand, FieldNames
from gateway.api.schemas.base import Lenient, Strict, described, note_ignored
from gateway.api.schemas.content_parts import CONTENT, NoTextBlock, read_content, text_of_part
from gateway.api.schemas.layers import Layer, chat_message
from gateway.api.schemas.messages import LeftOutTool, MessageBody, tool_kind, written_arguments
from gateway.api.schemas.openai import AnySchema, Strings, other_parameters, without_others
from gateway.output_format import OutputFormat
from gateway.tools.offer import MAX_LISTED_TOOLS, Tool, ToolOffer, offer_of
from outrider.wire.errors import InvalidRequest, NoThreads

MESSAGES_IGNORED = {
    "cache_control": "prefixes are found by their tokens, and kept until the memory is needed",
    "context_management": "nothing of a chat is cleared",
    "service_tier": "there is one",
    "inference_geo": "there is one",
    "speed": "there is one",
    "fallbacks": "there is one model, and it refuses nothing",
    "fallback_credit_token": "nothing is billed",
    "billing_policy": "nothing is billed",
    "diagnostics": "nothing is stored",
    "user_profile_id": "nothing is stored",
    "workspace_id": "nothing is stored",
}
COUNT_IGNORED = {
    **MESSAGES_IGNORED,
    "max_tokens": "nothing is generated",
    "stop_sequences": "nothing is generated",
    "metadata": "nothing is stored",
}
MESSAGES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "thread": (),
}
"""What is not offered, with the values that ask for nothing."""
WRITTEN = ("document", "search_result")
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", *WRITTEN)
DIRECT = "direct"
"""The caller of a tool that is the model itself."""


def as_blocks(value: Any) -> Any:
    if value is None:
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def block_kind(value: Any) -> str:
    """Raises InvalidRequest for a block that is not read here: pydantic's own error would not say of which type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind not in BLOCKS:
        shown = ", ".join(BLOCKS)
        raise NoTextBlock(f"messages has a block of type {kind!r}; read here are {shown}", param="messages")
    return f"<{kind}>" if kind not in WRITTEN else "<written>"


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


Texts = Annotated[
    list[TextBlock],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Lenient):
    type: Literal["redacted_thinking"]


class WrittenBlock(Strict):
    """A document or a search result, of which the text is read."""

    model_config = ConfigDict(extra="allow")

    type: Literal["document", "search_result"]

    @property
    def part(self) -> dict[str, Any]:
        return {"type": self.type, **(self.model_extra or {})}

    @model_validator(mode="after")
    def _is_text(self) -> WrittenBlock:
        text_of_part(self.part, "user")
        return self


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(default=None, description="an object")

    def written(self) -> str:
        """Return the input as JSON. Raises InvalidRequest."""
        try:
            return written_arguments(self.input)
        except ValueError as error:  # too deep
            raise InvalidRequest(f"a tool_use has an input that {error}", param="messages") from None


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = Field(
        default="",
        description="text; of a picture or a file, a line says that it was left out",
        json_schema_extra=CONTENT,
    )

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        return read_content(value, "tool")


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[WrittenBlock, Tag("<written>")],
    Discriminator(block_kind),
]
_FITS = {
    "user": ("text", "tool_result", *WRITTEN),
    "system": ("text",),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


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
        parts: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                if parts:
                    yield chat_message(role="user", content=parts)
                    parts = []
                yield chat_message(role="tool", tool_call_id=block.tool_use_id, content=block.content)
            elif isinstance(block, TextBlock):
                parts.append(text_part(block.text))
            elif isinstance(block, WrittenBlock):
                parts.append(text_part(text_of_part(block.part, "user") or ""))
        if parts or not self.content:
            yield chat_message(role=self.role, content=parts)

    def _assistant(self) -> MessageBody:
        calls = [
            {"id": each.id, "function": {"name": each.name, "arguments": each.written()}}
            for each in self.content
            if isinstance(each, ToolUseBlock)
        ]
        thinking = "\n".join(each.thinking for each in self.content if isinstance(each, ThinkingBlock))
        return chat_message(
            role="assistant",
            content=text_parts([each for each in self.content if isinstance(each, TextBlock)]),
            tool_calls=calls,
            reasoning_content=thinking,
        )


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def text_parts(blocks: Sequence[TextBlock]) -> Any:
    """Return a chat's content: one text as it is, several as parts."""
    texts = [each.text for each in blocks]
    return texts[0] if len(texts) == 1 else [text_part(text) for text in texts]


class MessagesTool(Lenient):
    """A tool of the client's."""

    type: Literal["custom"] | None = described("custom; a tool of another type is left out")
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of an object")
    strict: bool | None = described("as chat's. Default: false")
    allowed_callers: list[str] | None = described("a tool that programs alone may call is left out")

    def tool(self, place: int) -> Tool | None:
        """Return it as the `place`-th of its request; None for one that the model may not call."""
        if self.allowed_callers and DIRECT not in self.allowed_callers:
            note_ignored("tools that programs alone may call, which are not offered to the model")
            return None
        return Tool(self.name, self.description, self.input_schema, self.strict, f"tools[{place}].input_schema")


class ProvidersTool(LeftOutTool):
    type: str = Field(json_schema_extra={"not": {"enum": ["custom"]}})


AnyMessagesTool = Annotated[
    Annotated[MessagesTool, Tag("<offered>")] | Annotated[ProvidersTool, Tag("<left out>")], tool_kind("custom")
]


class ToolChoice(Lenient):
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


class Thinking(Lenient):
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


class Metadata(Lenient):
    user_id: str | None = described("as chat's `user`", maxLength=MAX_USER_CHARS)


class CountBody(Layer):
    """POST /v1/messages/count_tokens: what a message is made of, without what says how it is answered."""

    model_config = ConfigDict(json_schema_extra=other_parameters(MESSAGES_NEUTRAL, COUNT_IGNORED))
    ignored: ClassVar[dict[str, str]] = COUNT_IGNORED

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description=f"at most {MAX_MESSAGES}, the last one the user's; text, or blocks {', '.join(BLOCKS)}"
    )
    system: Texts | None = described("a string, or text blocks; see [messages](#messages)")
    tools: Annotated[list[AnyMessagesTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = described(
        "of different names, at most `--max-tools`, of `--max-tools-bytes` in all; Anthropic's own are left out"
    )
    tool_choice: ToolChoice | None = described("`type` auto, any, tool (with a `name`) or none. Default: auto")
    thinking: Thinking | None = described("passed to the chat template as `enable_thinking`. Default: the template's")
    output_config: OutputConfig | None = described("`effort`, and `format`: json_schema with a `schema`")
    output_format: JsonOutput | None = described("the older name of `output_config.format`, which goes before it")

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, value: Any) -> Any:
        """Raises InvalidRequest naming what is not offered and asks for something."""
        if isinstance(value, dict) and value.get("thread") is not None:
            raise NoThreads(
                "thread is not offered by this server, which stores nothing; send the whole history without it",
                param="thread",
            )
        return without_others(value, MESSAGES_NEUTRAL, cls.ignored)

    def demand(self, request_id: str, **others: Any) -> Demand:
        """Raises InvalidRequest."""
        if self.messages[-1].role == "assistant":
            text = "messages ends with the assistant's own, which is not continued here; end with the user's"
            raise InvalidRequest(text, param="messages")
        messages = [chat_message(role="system", content=text_parts(self.system))] if self.system else []
        for each in self.messages:
            messages += each.messages()
        offered = [each.tool(at) for at, each in enumerate(self.tools or ())]
        tools = [each for each in offered if each is not None]
        config = self.output_config or OutputConfig()
        output = None
        if config.format is not None:
            output = OutputFormat("json", config.format.schema_, "output_config.format.schema")
        elif self.output_format is not None:
            output = OutputFormat("json", self.output_format.schema_, "output_format.schema")
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

    model_config = ConfigDict(json_schema_extra=other_parameters(MESSAGES_NEUTRAL, MESSAGES_IGNORED))
    ignored: ClassVar[dict[str, str]] = MESSAGES_IGNORED

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
