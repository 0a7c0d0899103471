"""Compiles and renders chat templates, in a process of a `ConfinedPool`. Only this module runs templates.

Templates follow Hugging Face's Jinja conventions. They come with the model from an unknown author, so they run in a
sandbox: it limits which objects a template may use, and the process limits time and memory. `gateway.chat_template`
sends the requests.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.confined.template_messages import ROLES, unknown_role, ways_of
from gateway.confined.template_shape import PROBE_TOOL, Message, TemplateShape, shape_of
from outrider.wire.errors import InvalidRequest

_MESSAGE: Message = {"role": "user", "content": "How do you do?"}
"""Message that is rendered to find out whether a template adds anything to its text."""
MAX_WHY_CHARS = 1000
"""Maximal number of characters of a template's error that an error to the caller quotes."""
MAX_ROLE_CHARS = 80
"""Maximal number of characters of an unknown role that an error to the caller quotes."""
MAX_PROBE_CHARS = 1 << 20
"""Maximal length of the text that a template may write for a trial message, in characters. Among public templates, the
longest with one tool has 20,000."""


def prepare() -> None:
    """Compile and render a small template, so that Jinja's modules are loaded before the first request."""
    work({"kind": "check", "source": "{{ messages }}"})
    render = {"kind": "render", "source": "{{ messages | tojson }}", "names": {"messages": []}, "max_chars": 10}
    work({**render, "shape": asdict(TemplateShape()), "merges": True})


def work(request: dict[str, Any]) -> Any:
    """Do a piece of work on a chat template and return the result, which depends on `request["kind"]`.

    "check": the variables that the template reads. "probe": the fields of its TemplateShape. "render": the rendered
    chat, or None if it has more than `request["max_chars"]` characters. Raises InvalidRequest for an unusable template
    or chat.
    """
    source = request["source"]
    if request["kind"] == "check":
        return _check(source)
    if request["kind"] == "probe":
        return _probe(source, request["names"])
    shape = TemplateShape(**request["shape"])
    return _render(source, request["names"], shape, request["merges"], request["max_chars"])


def _check(source: str) -> list[str]:
    """Return the variables that a template reads. Raises InvalidRequest if it cannot be compiled."""
    try:
        _compiled(source)
        return sorted(meta.find_undeclared_variables(_environment().parse(source)))
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(f"has a syntax error at line {error.lineno}: {_shown(error.message)}") from None
    except Exception as error:  # Jinja makes Python of a template, which Python's compiler may refuse in many ways
        raise InvalidRequest(f"cannot be compiled: {type(error).__name__}: {_shown(error)}") from None


def _probe(source: str, names: dict[str, Any]) -> dict[str, Any]:

    def render(messages: list[Message], **more: Any) -> str:
        variables = {**names, "messages": messages, "documents": None, **more}
        try:
            return _written(source, variables, MAX_PROBE_CHARS) or ""
        except MemoryError:
            raise
        except Exception:  # the template refuses such messages
            return ""

    def render_probe(messages: list[Message]) -> str:
        # With a tool for messages that have calls, and for templates that write nothing without one.
        text = ""
        if not _has_calls(messages):
            text = render(messages, tools=None, add_generation_prompt=False)
        return text or render(messages, tools=[PROBE_TOOL], add_generation_prompt=False)

    shape = shape_of(render_probe)
    if PROBE_TOOL["function"]["name"] in render([_MESSAGE], tools=[PROBE_TOOL], add_generation_prompt=True):
        shape = replace(shape, message_tools=None)  # it reads the variable
    text = render([_MESSAGE], tools=None, add_generation_prompt=True)
    return asdict(replace(shape, marks_roles=text.strip() != _MESSAGE["content"]))


def _has_calls(messages: list[Message]) -> bool:
    return any("tool_calls" in message for message in messages)


def _render(source: str, names: dict[str, Any], shape: TemplateShape, merges: bool, max_chars: int) -> str | None:
    """Return the rendered chat, or None if it has more than `max_chars` characters.

    Raises InvalidRequest with the template's own message if it refuses the messages, in whichever way they are written.
    """
    messages = names["messages"]
    unknown = unknown_role(messages, source)
    if unknown is not None:
        place, role = unknown
        raise InvalidRequest(
            f"messages[{place}].role is {role[:MAX_ROLE_CHARS]!r}, must be one of {', '.join(ROLES)}, or one that the "
            "chat template names",
            param=f"messages[{place}].role",
        )
    refusal = ""
    for written in ways_of(messages, source, shape, merges):
        try:
            return _written(source, {**names, "messages": written}, max_chars)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything; it is about these messages
            refusal = refusal or f"the chat template refuses the messages: {_shown(error)}"
    raise InvalidRequest(refusal, param="messages")


def _written(source: str, names: dict[str, Any], max_chars: int) -> str | None:
    parts: list[str] = []
    num_chars = 0
    for part in _compiled(source).generate(names):
        num_chars += len(part)
        if num_chars > max_chars:
            return None
        parts.append(part)
    return "".join(parts)


def _shown(error: object) -> str:
    return str(error)[:MAX_WHY_CHARS]


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        optimized=False,  # constant expressions are evaluated only when they are rendered
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del environment.globals["lipsum"]
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Without Jinja's HTML escapes. Arguments are in transformers' order: templates give them by position.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """Replaces {% generation %}...{% endgeneration %}, which marks outputs for training, by its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
