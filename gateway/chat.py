"""Chat templates: messages to one text, by Hugging Face's Jinja conventions. Templates are untrusted, so sandboxed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.wire.errors import ConfigError, InvalidRequest

Message = dict[str, Any]
"""At least `role` and `content`, both text."""


class ChatTemplate:
    """A compiled template. Raises ConfigError when the source is no template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template has a syntax error at line {error.lineno}: {error.message}") from None
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, extra: Mapping[str, Any]) -> str:
        """Raises InvalidRequest with the template's own words when it refuses the messages."""
        names: dict[str, Any] = {"messages": [self._known(message) for message in messages], **self._special_tokens}
        names |= {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        if clash := sorted(names.keys() & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {clash[0]}", param="chat_template_kwargs")
        try:
            return self._template.render({**names, **extra})
        except Exception as error:  # whatever a template does to these messages is about these messages
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from None

    def _known(self, message: Message) -> Message:
        """OpenAI's newer name for the system role, for templates older than it."""
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def find_template(file_text: str, configured: Any) -> str | None:
    """The template's source: chat_template.jinja, else `chat_template` of tokenizer_config.json, else None.

    `configured` is text, or a list of {"name", "template"} of which "default" is taken.
    """
    if file_text:
        return file_text
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """{% generation %}...{% endgeneration %} marks answers for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(lineno)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which prompts must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
