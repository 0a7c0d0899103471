"""The fields `response_format` and `structured_outputs`: the format that an output must have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.api.schemas.base import StrictSchema, described
from gateway.output_format import OutputFormat, one_output
from outrider.wire.errors import InvalidRequest

AnySchema = Annotated[Any, Field(json_schema_extra={"type": ["object", "boolean"]})]
"""A JSON Schema: an object, true or false."""


class JsonSchemaBody(StrictSchema):
    """OpenAI's `json_schema`. Its name and description are not used, because no chat template writes them."""

    name: str | None = described("changes nothing")
    description: str | None = described("changes nothing")
    schema_: AnySchema = Field(alias="schema", description="a JSON Schema (2020-12)")
    strict: bool | None = described("hold the schema to OpenAI's rules for strict ones. Default: false")


class ResponseFormatBody(StrictSchema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = described("with type json_schema, and only with it")

    def output(self) -> OutputFormat | None:
        """Return the format that the output must have; None for any text.

        Raises InvalidRequest if `type` is json_schema without the field `json_schema`, or another type with this field.
        """
        if (self.type == "json_schema") is (self.json_schema is None):
            text = f"response_format has type {self.type} and {'no ' * (self.json_schema is None)}json_schema"
            raise InvalidRequest(f"{text}; they go together", param="response_format.json_schema")
        if self.json_schema is not None:
            param = "response_format.json_schema.schema"
            return OutputFormat("json", self.json_schema.schema_, param, bool(self.json_schema.strict))
        if self.type == "text":
            return None
        return OutputFormat("json_object", None, "response_format")


class StructuredOutputsBody(StrictSchema):
    """vLLM's field `structured_outputs`. Exactly one of its fields must be set."""

    json_: Annotated[Any, Field(json_schema_extra={"type": ["object", "boolean", "string", "null"]})] = Field(
        default=None, alias="json", description="a JSON Schema, or its text"
    )
    regex: str | None = described("of the whole output, in the syntax of Rust's regex")
    choice: list[str] | None = described("one of these texts")
    grammar: str | None = described("Lark or GBNF")
    json_object: bool | None = described("any JSON object")

    def output(self) -> OutputFormat:
        """Return the format that the output must have. Raises InvalidRequest unless exactly one field is set."""
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        values["json_object"] = self.json_object or None
        return one_output(values)
