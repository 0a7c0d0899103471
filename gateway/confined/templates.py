"""Compiles and renders chat templates, in a process of a `ConfinedPool`: no other part of the gateway runs a template.

Templates follow Hugging Face's Jinja conventions and run in a sandbox, since nobody vouches for them. The sandbox
bounds what a template may reach; the process bounds the time and memory that it may take.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.wire.errors import InvalidRequest

_MESSAGE = "How do you do?"
"""Any message of a user."""
MAX_WHY_CHARS = 1000
"""Characters of an error of a template that are shown."""


def prepare() -> None:
    """Render once, for what Jinja imports at its first template."""
    work({"kind": "check", "sources": ["{{ messages }}"]})
    work({"kind": "render", "source": "{{ messages | tojson }}", "names": {"messages": []}, "max_chars": 10})


def work(request: dict[str, Any]) -> Any:
    if request["kind"] == "check":
        return [_check(source) for source in request["sources"]]
    return _render(request["source"], request["names"], request["max_chars"])


def _check(source: str) -> dict[str, bool]:
    """Return what a template reads. Raise InvalidRequest when it cannot be compiled."""
    try:
        _compiled(source)
        takes_tools = "tools" in meta.find_undeclared_variables(_environment().parse(source))
        return {"takes_tools": takes_tools, "marks_turns": _marks_turns(source)}
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(f"has a syntax error at line {error.lineno}: {_shown(error.message)}") from None
    except Exception as error:  # Jinja writes Python, whose compiler refuses some of it in many ways
        raise InvalidRequest(f"cannot be compiled: {type(error).__name__}: {_shown(error)}") from None


def _marks_turns(source: str) -> bool:
    """Return whether a template writes more than the message itself: marks of who speaks, as chat models learn them.

    A template that refuses so plain a chat was made for a model of its own kind, and is taken for one that does.
    """
    names = {"messages": [{"role": "user", "content": _MESSAGE}], "add_generation_prompt": True}
    try:
        text = _render(source, {**names, "tools": None, "documents": None}, len(_MESSAGE) + MAX_WHY_CHARS)
    except InvalidRequest:
        return True
    return text is None or text.strip() != _MESSAGE


def _render(source: str, names: dict[str, Any], max_chars: int) -> str | None:
    """Return the text, or None when it has more than `max_chars` characters. Raise InvalidRequest in the template's own
    words when it refuses the messages.
    """
    parts: list[str] = []
    num_chars = 0
    try:
        for part in _compiled(source).generate(names):
            num_chars += len(part)
            if num_chars > max_chars:
                return None
            parts.append(part)
    except MemoryError:
        raise
    except Exception as error:  # whatever a template does to these messages is about these messages
        raise InvalidRequest(f"the chat template refuses the messages: {_shown(error)}", param="messages") from None
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
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # without Jinja's HTML escapes
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del environment.globals["lipsum"]
    return environment


class _GenerationBlock(Extension):
    """Replace {% generation %}...{% endgeneration %}, which marks answers for training, by its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
