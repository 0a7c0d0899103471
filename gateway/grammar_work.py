"""The work of a process that checks grammars. `gateway.confined.process` imports this module.

A request is {"format": fields of an OutputFormat} or {"tools": fields of a ToolGrammarRequest}. The reply is the text
of the grammar that workers enforce.
"""

from __future__ import annotations

from typing import Any

from gateway import grammars
from gateway.output_format import OutputFormat
from gateway.tools.grammar_request import ToolGrammarRequest
from gateway.tools.tool_grammar import tool_grammar


def prepare() -> None:
    """Compile a small grammar, so that all modules are loaded before the first request."""
    grammars.create_json_object_grammar("prepare")


def work(request: dict[str, Any]) -> str:
    """Return the grammar that workers enforce for a request. Raises InvalidRequest.

    request: {"format": fields of an OutputFormat} or {"tools": fields of a ToolGrammarRequest}.
    """
    if "tools" in request:
        return tool_grammar(ToolGrammarRequest.from_json(request["tools"]))
    return grammars.grammar_of(OutputFormat(**request["format"]))
