"""Fields of POST /v1/responses besides its input: ignored parameters, output format and reasoning effort."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.api.schemas.base import LenientSchema, StrictSchema, described
from gateway.api.schemas.structured_outputs import JsonSchemaBody, ResponseFormatBody
from gateway.output_format import OutputFormat
from outrider.wire.errors import InvalidRequest

RESPONSES_IGNORED = {
    "service_tier": "there is one",
    "prompt_cache_key": "prefixes are found by their tokens; a pair has one cache",
    "prompt_cache_retention": "kept until the memory is needed",
    "prompt_cache_options": "kept until the memory is needed",
    "stream_options": "its `include_obfuscation` is padding against traffic analysis",
    "max_tool_calls": "of tools that the server runs, and it runs none",
    "client_metadata": "nothing is stored",
}
"""Parameters of /v1/responses that are accepted and have no effect, with the reason."""
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
"""For each parameter of /v1/responses that is not supported: the values (besides null) that are still accepted, because
the server does the same without the parameter. For example, the server stores no responses, so `store` may only be
false or null."""

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


class TextFormat(JsonSchemaBody):
    """OpenAI's field `text.format` of /v1/responses.

    It is the `response_format` of a chat, except that the fields of `json_schema` are directly beside `type`.
    """

    type: Literal["text", "json_object", "json_schema"]
    schema_: Any = Field(default=None, alias="schema", description="a JSON Schema (2020-12), with type json_schema")

    def output(self) -> OutputFormat | None:
        """Return the format that the output must have; None for any text.

        Raises InvalidRequest if `type` is json_schema and `schema` is missing, or if another type has a `schema`.
        """
        if (self.type == "json_schema") is (self.schema_ is None):
            text = f"text.format has type {self.type} and {'no ' * (self.schema_ is None)}schema; they go together"
            raise InvalidRequest(text, param="text.format")
        if self.type == "json_schema":
            return OutputFormat("json", self.schema_, "text.format.schema", bool(self.strict))
        output = ResponseFormatBody(type=self.type).output()
        if output is None:
            return None
        return OutputFormat(output.kind, output.value, "text.format")


class TextBody(StrictSchema):
    format: TextFormat | None = described("what the answer has to be")
    verbosity: Literal["low", "medium", "high"] | None = described("ignored: models here are not told of it")


class ReasoningBody(LenientSchema):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = described("as chat's")
    summary: Literal["auto", "concise", "detailed"] | None = described("ignored: reasoning comes as it is")
    generate_summary: Literal["auto", "concise", "detailed"] | None = described("ignored, as `summary`")
