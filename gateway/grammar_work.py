"""The work of a process that checks grammars: `gateway.confined.process` imports this module.

A request is {"format": fields of an OutputFormat} or {"tools": fields of a ToolGrammarRequest}; the reply is the text
of the grammar for the workers.
"""

from __future__ import annotations

from typing import Any

from gateway import grammars
from gateway.output_format import OutputFormat
from gateway.tools.grammar import tool_grammar
from gateway.tools.grammar_request import ToolGrammarRequest


def prepare() -> None:
    """Compile a grammar, so that all that the first request needs is loaded."""
    grammars.of_json_object("prepare")


def work(request: dict[str, Any]) -> str:
    if "tools" in request:
        return tool_grammar(ToolGrammarRequest.from_json(request["tools"]))
    return grammars.grammar_of(OutputFormat(**request["format"]))
