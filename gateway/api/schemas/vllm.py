"""The bodies of vLLM's POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from gateway.admission.request_checks import MAX_MESSAGES
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.schemas.base import StrictSchema, described
from gateway.api.schemas.messages import AnyTool, MessageBody
from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.other_parameters import other_parameters, without_others
from gateway.tools.offer import MAX_LISTED_TOOLS
from outrider.wire.errors import InvalidRequest
from outrider.wire.settings.config import ContentControlTokens

TOKENIZE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "mm_processor_kwargs": (),
}
"""For each parameter of vLLM's /tokenize that is not supported: the values besides null that are accepted, because they
ask for what the server does anyway."""
MAX_TOKENS = 1 << 18
"""Maximal number of tokens in one /detokenize request: about 2 MB of JSON, which takes 10 ms to parse."""


class TokenizeBody(StrictSchema):
    """Body of POST /tokenize. It has either a text (`prompt`) or a chat (`messages`)."""

    model_config = ConfigDict(json_schema_extra=other_parameters(TOKENIZE_NEUTRAL, {}))

    model: str | None = described("as chat's. Default: the only one")
    prompt: str | None = described("a text, which may be empty; or give `messages`")
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = (
        described("a chat, as chat's")
    )
    add_special_tokens: bool | None = described("those of the tokenizer. Default: true; of a chat only false")
    return_token_strs: bool | None = described("`token_strs`, as the vocabulary writes them. Default: false")
    add_generation_prompt: bool | None = described("as chat's. Default: true")
    continue_final_message: bool | None = described("as chat's. Default: false")
    chat_template_kwargs: dict[str, Any] | None = described("as chat's")
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = described(
        "as chat's"
    )
    control_tokens_in_content: ContentControlTokens | None = described("as chat's")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = described("as chat's")

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, value: Any) -> Any:
        if isinstance(value, dict) and (value.get("prompt") is None) is (value.get("messages") is None):
            raise InvalidRequest("prompt and messages: give one of them, and not both", param="prompt")
        return without_others(value, TOKENIZE_NEUTRAL, {})

    def unchecked_request(self, request_id: str) -> UncheckedRequest:
        """Return a request with the chat to tokenize. The body must have `messages`.

        Raises InvalidRequest for fields that contradict each other, and for `add_special_tokens: true`.
        """
        if self.add_special_tokens:
            text = "add_special_tokens is true, and a chat has those that its template writes; leave it out"
            raise InvalidRequest(text, param="add_special_tokens")
        assert self.messages is not None, "a text is no chat"
        chat = ChatBody(
            model=self.model,
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            tools=self.tools,
        )
        others = {
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": self.continue_final_message,
            "documents": self.documents,
            "control_tokens_in_content": self.control_tokens_in_content,
        }
        return chat.model_copy(update=others).unchecked_request(request_id)


class DetokenizeBody(StrictSchema):
    """Body of POST /detokenize."""

    model: str | None = described("as chat's. Default: the only one")
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)] = Field(
        description="token ids", json_schema_extra={"items": {"type": "integer", "minimum": 0}}
    )
