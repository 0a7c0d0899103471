"""The content blocks in POST /v1/messages: text, documents, reasoning, tool calls and their results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from gateway.admission.request_checks import MAX_MESSAGES
from gateway.api.schemas.base import LenientSchema, StrictSchema
from gateway.api.schemas.content_parts import CONTENT, NoTextBlock, read_content, text_of_part
from gateway.api.schemas.messages import type_field, written_arguments
from outrider.wire.errors import InvalidRequest

DOCUMENTS = ("document", "search_result")
"""Types of content blocks, of a user's message, whose text goes into the prompt below their title."""
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", *DOCUMENTS)
"""All types of content blocks that a request of /v1/messages may contain."""
ROLE_BLOCKS = {
    "user": ("text", "tool_result", *DOCUMENTS),
    "system": ("text",),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""For each role of a message: the types of content blocks that the message may contain."""


def as_blocks(value: Any) -> Any:
    """Return `value` as a list of content blocks.

    A string becomes a list of one text block, None an empty list. Any other value is returned unchanged.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return value


def _block_tag(value: Any) -> str:
    kind = type_field(value)
    if kind not in BLOCKS:  # not left to pydantic, whose error does not name the type
        shown = ", ".join(BLOCKS)
        raise NoTextBlock(f"messages has a block of type {kind!r}; read here are {shown}", param="messages")
    if kind in DOCUMENTS:
        return "<document>"
    return f"<{kind}>"


class TextBlock(LenientSchema):
    type: Literal["text"]
    text: str


Texts = Annotated[
    list[TextBlock],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ThinkingBlock(LenientSchema):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(LenientSchema):
    type: Literal["redacted_thinking"]


class WrittenBlock(StrictSchema):
    """Content block that is a document or a search result. Its text goes into the prompt."""

    model_config = ConfigDict(extra="allow")

    type: Literal["document", "search_result"]

    @property
    def part(self) -> dict[str, Any]:
        """The block as a content part of a chat message: its type with its other fields."""
        return {"type": self.type, **(self.model_extra or {})}

    @model_validator(mode="after")
    def _is_text(self) -> WrittenBlock:
        text_of_part(self.part, "user")
        return self


class ToolUseBlock(LenientSchema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(default=None, description="an object")

    def written(self) -> str:
        """Return the call's input as JSON. Raises InvalidRequest if it nests too deep for orjson."""
        try:
            return written_arguments(self.input)
        except ValueError as error:
            raise InvalidRequest(f"a tool_use has an input that {error}", param="messages") from None


class ToolResultBlock(LenientSchema):
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
    | Annotated[WrittenBlock, Tag("<document>")],
    Discriminator(_block_tag),
]


def text_part(text: str) -> dict[str, Any]:
    """Return a content part of a chat message that holds this text."""
    return {"type": "text", "text": text}


def content_of(blocks: Iterable[Any]) -> str | list[dict[str, Any]]:
    """Return the text blocks among `blocks` as the content of a chat message.

    A single text becomes a string, several become a list of parts. Other blocks are skipped.
    """
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if len(texts) == 1:
        return str(texts[0])
    return [text_part(text) for text in texts]
