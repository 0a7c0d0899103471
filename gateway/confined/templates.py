"""Compiles and renders chat templates, in a process of a `ConfinedPool`: no other part of the gateway runs a template.

Templates follow Hugging Face's Jinja conventions and run in a sandbox, since nobody vouches for them. The sandbox
bounds what a template may reach; the process bounds the time and memory that it may take.
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
"""Any message of a user."""
MAX_WHY_CHARS = 1000
"""Characters of an error of a template that are shown."""
MAX_ROLE_CHARS = 80
"""Characters of an unknown role that are shown."""
MAX_PROBE_CHARS = 1 << 20
"""Characters of a marked chat at most: of public templates that tell of one tool the longest have 20,000."""


def prepare() -> None:
    """Render once, for what Jinja imports at its first template."""
    work({"kind": "check", "source": "{{ messages }}"})
    render = {"kind": "render", "source": "{{ messages | tojson }}", "names": {"messages": []}, "max_chars": 10}
    work({**render, "shape": asdict(TemplateShape()), "merges": True})


def work(request: dict[str, Any]) -> Any:
    source = request["source"]
    if request["kind"] == "check":
        return _check(source)
    if request["kind"] == "probe":
        return _probe(source, request["names"])
    shape = TemplateShape(**request["shape"])
    return _render(source, request["names"], shape, request["merges"], request["max_chars"])


def _check(source: str) -> list[str]:
    """Return the variables that a template reads. Raise InvalidRequest when it cannot be compiled."""
    try:
        _compiled(source)
        return sorted(meta.find_undeclared_variables(_environment().parse(source)))
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(f"has a syntax error at line {error.lineno}: {_shown(error.message)}") from None
    except Exception as error:  # Jinja writes Python, whose compiler refuses some of it in many ways
        raise InvalidRequest(f"cannot be compiled: {type(error).__name__}: {_shown(error)}") from None


def _probe(source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the template's TemplateShape."""

    def render(messages: list[Message], **more: Any) -> str:
        variables = {**names, "messages": messages, "documents": None, **more}
        try:
            return _written(source, variables, MAX_PROBE_CHARS) or ""
        except MemoryError:
            raise
        except Exception:  # it takes no such messages
            return ""

    def shown(messages: list[Message]) -> str:
        """Offer a tool beside calls, and where the template takes nothing without."""
        has_calls = any("tool_calls" in message for message in messages)
        plain = "" if has_calls else render(messages, tools=None, add_generation_prompt=False)
        return plain or render(messages, tools=[PROBE_TOOL], add_generation_prompt=False)

    shape = shape_of(shown)
    asked = render([_MESSAGE], tools=None, add_generation_prompt=True)
    return asdict(replace(shape, marks_turns=asked.strip() != _MESSAGE["content"]))


def _render(source: str, names: dict[str, Any], shape: TemplateShape, merges: bool, max_chars: int) -> str | None:
    """Return the text, or None when it has more than `max_chars` characters. Raise InvalidRequest in the template's own
    words when it refuses the messages, in whichever way they are written.
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
        except Exception as error:  # whatever a template does to these messages is about these messages
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
        optimized=False,  # nothing is computed that no request needs
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
    """Return JSON without Jinja's HTML escapes. The arguments' order is transformers': templates give them by place."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """Replace {% generation %}...{% endgeneration %}, which marks answers for training, by its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
