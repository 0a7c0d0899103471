"""Bodies of Anthropic's POST /v1/messages and /v1/messages/count_tokens, and their conversion to chat messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.admission.request_checks import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_USER_CHARS
from gateway.admission.unchecked_request import FieldNames, UncheckedRequest
from gateway.api.layers.messages_blocks import (
    BLOCKS,
    ROLE_BLOCKS,
    Block,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    WrittenBlock,
    as_blocks,
    content_of,
    text_part,
)
from gateway.api.layers.messages_tools import AnyMessagesTool, ToolChoice
from gateway.api.schemas.base import LenientSchema, StrictSchema, described
from gateway.api.schemas.content_parts import text_of_part
from gateway.api.schemas.field_types import Strings
from gateway.api.schemas.layers import Layer, chat_message
from gateway.api.schemas.messages import MessageBody
from gateway.api.schemas.openai import MAX_THINKING_TOKENS
from gateway.api.schemas.other_parameters import other_parameters, without_others
from gateway.api.schemas.structured_outputs import AnySchema
from gateway.output_format import OutputFormat
from gateway.tools.offer import MAX_LISTED_TOOLS, Tool
from outrider.wire.errors import InvalidRequest, NoThreads
from outrider.wire.requests.params import Range

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
"""Parameters of /v1/messages that are accepted and have no effect, with the reason."""
COUNT_IGNORED = {
    **MESSAGES_IGNORED,
    "max_tokens": "nothing is generated",
    "stop_sequences": "nothing is generated",
    "metadata": "nothing is stored",
}
"""Parameters of /v1/messages/count_tokens that are accepted and have no effect, with the reason."""
MESSAGES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "thread": (),
}
"""For each parameter of /v1/messages that is not supported: the values besides null that are accepted, because they ask
for what the server does anyway."""


class MessagesInputMessage(LenientSchema):
    """One message of a request of /v1/messages.

    Fields besides `role` and `content` are ignored, because clients send back whole responses as messages.
    """

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(as_blocks, json_schema_input_type=str | list[Block]),
    ]

    @model_validator(mode="after")
    def _check_role(self) -> MessagesInputMessage:
        for block in self.content:
            if block.type not in ROLE_BLOCKS[self.role]:
                raise ValueError(f"has role {self.role} and a block of type {block.type}, which do not go together")
        return self

    def messages(self) -> Iterator[MessageBody]:
        """Yield the chat messages that this message becomes, such as one for each tool result and one for the text."""
        # text, tool_result, text: three messages, of user, tool and user
        if self.role == "assistant":
            yield self._assistant_message()
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

    def _assistant_message(self) -> MessageBody:
        calls = []
        thinking = []
        for block in self.content:
            if isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": block.written()}
                calls.append({"id": block.id, "function": function})
            elif isinstance(block, ThinkingBlock):
                thinking.append(block.thinking)
        return chat_message(
            role="assistant",
            content=content_of(self.content),
            tool_calls=calls,
            reasoning_content="\n".join(thinking),
        )


BUDGET_TOKENS = Range(1, MAX_THINKING_TOKENS)


class Thinking(LenientSchema):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = described(
        "as chat's `thinking_token_budget`; ignored for a model that cannot keep it", BUDGET_TOKENS
    )
    display: Literal["summarized", "omitted"] | None = described("ignored: reasoning comes as it is")


class JsonOutput(StrictSchema):
    type: Literal["json_schema"]
    schema_: AnySchema = Field(alias="schema", description="a JSON Schema (2020-12)")


class OutputConfig(StrictSchema):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = described(
        "passed to the template as `reasoning_effort`, max as xhigh"
    )
    format: JsonOutput | None = described("what the answer has to be")


class Metadata(LenientSchema):
    user_id: str | None = described("as chat's `user`", maxLength=MAX_USER_CHARS)


class CountBody(Layer):
    """Body of POST /v1/messages/count_tokens: the fields of a Messages request that make up its prompt."""

    model_config = ConfigDict(json_schema_extra=other_parameters(MESSAGES_NEUTRAL, COUNT_IGNORED))
    ignored: ClassVar[dict[str, str]] = COUNT_IGNORED

    messages: Annotated[list[MessagesInputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = (
        Field(description=f"at most {MAX_MESSAGES}, the last one the user's; text, or blocks {', '.join(BLOCKS)}")
    )
    system: Texts | None = described("a string, or text blocks; see [messages](#messages)")
    tools: Annotated[list[AnyMessagesTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = described(
        "of different names, at most `--max-tools`, of `--max-tools-bytes` in all; Anthropic's own are left out"
    )
    tool_choice: ToolChoice | None = described("`type` auto, any, tool (with a `name`) or none. Default: auto")
    thinking: Thinking | None = described(
        "passed to the chat template as `enable_thinking`; `budget_tokens` limits the reasoning. Default: the "
        "template's"
    )
    output_config: OutputConfig | None = described("`effort`, and `format`: json_schema with a `schema`")
    output_format: JsonOutput | None = described("the older name of `output_config.format`, which goes before it")

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("thread") is not None:
            raise NoThreads(
                "thread is not offered by this server, which stores nothing; send the whole history without it",
                param="thread",
            )
        return without_others(value, MESSAGES_NEUTRAL, cls.ignored)

    def unchecked_request(self, request_id: str, **others: Any) -> UncheckedRequest:
        """Return the request, not yet tokenized, for one output to these messages.

        others: values for further fields of the ChatBody (/v1/chat/completions) to which this body is converted. Raises
        InvalidRequest for messages that end with the assistant's, and for other fields that cannot be converted.
        """
        if self.messages[-1].role == "assistant":
            text = "messages ends with the assistant's own, which is not continued here; end with the user's"
            raise InvalidRequest(text, param="messages")
        messages = self._chat_messages()
        tools = self._offered_tools()
        output = self._output_format()
        return self.unchecked_chat_request(
            request_id,
            messages,
            (self.tool_choice or ToolChoice(type="auto")).offer(tools),
            FieldNames(prompt="messages", stop="stop_sequences"),
            output,
            reasoning_effort=self._reasoning_effort(),
            thinking_token_budget=self._thinking_token_budget(),
            **others,
        )

    def _chat_messages(self) -> list[MessageBody]:
        messages = []
        if self.system:
            messages.append(chat_message(role="system", content=content_of(self.system)))
        for message in self.messages:
            messages += message.messages()
        return messages

    def _offered_tools(self) -> list[Tool]:
        tools = []
        for index, body in enumerate(self.tools or ()):
            tool = body.tool(index)
            if tool is not None:
                tools.append(tool)
        return tools

    def _output_format(self) -> OutputFormat | None:
        if self.output_config is not None and self.output_config.format is not None:
            return OutputFormat("json", self.output_config.format.schema_, "output_config.format.schema")
        if self.output_format is not None:
            return OutputFormat("json", self.output_format.schema_, "output_format.schema")
        return None

    def _reasoning_effort(self) -> str | None:
        if self.output_config is None:
            return None
        if self.output_config.effort == "max":
            return "xhigh"
        return self.output_config.effort

    def _thinking_token_budget(self) -> int | None:
        if self.thinking is None or self.thinking.type != "enabled":
            return None
        num_tokens = self.thinking.budget_tokens
        if num_tokens is not None:
            BUDGET_TOKENS.check("thinking.budget_tokens", num_tokens)
        return num_tokens

    def template_variables(self) -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables = {"enable_thinking": self.thinking.type != "disabled", **variables}
        return variables


class MessagesBody(CountBody):
    """Body of POST /v1/messages."""

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

    def unchecked_request(self, request_id: str, **others: Any) -> UncheckedRequest:
        return super().unchecked_request(
            request_id,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stop_in_reasoning=self.stop_in_reasoning,
            user=self.metadata and self.metadata.user_id,
            **others,
        )
