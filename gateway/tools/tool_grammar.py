"""Makes the grammar of an output with tools, to which the target worker holds the model.

`gateway.grammar_work` calls `tool_grammar` in a process of its own. `gateway.grammars` checks and writes the schema of
each tool; the texts of the model's family around them are written here, in the Lark of llguidance. A marker that is one
token is named by its id, as its text would be other tokens. The end of the reasoning and the marker of calls are also
recognised as text, since a model may write them with other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from gateway.grammars import MARKER_ID, error_of, schema_text
from gateway.tools.call_families import MARKER, NAME, CallFamily, Marks
from gateway.tools.grammar_request import ToolGrammarRequest
from gateway.tools.offer import NO_PARAMETERS, Tool, ToolOffer
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import MAX_GRAMMAR_BYTES

TokenOf = Callable[[str], int | None]
"""Function that returns the id of a text that is one control token, None for another text."""
MAX_CALLS = 16
"""Calls of one output that a grammar allows, so that a model which keeps calling comes to an end."""
TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"[\s\x1c-\x1f]*"
"""White space that `str.strip` removes, as the reader does."""
FREE = rf"FREE: /{_SPACE}(\[{_SPACE}\[(.|\n)*|(\[{_SPACE})?([^\s\x1c-\x1f{{\[](.|\n)*)?)/"
"""Text that is no call in a family whose calls need no marker: it begins neither with an object nor with a list of
objects."""
_JSON = re.compile(r'"[^"]*"|[{}]|[:,] ')
_TOKEN_ID = re.compile(r"<\[\d+\]>")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def tool_grammar(request: ToolGrammarRequest) -> str:
    """Return the grammar of a whole output, its reasoning included, as JSON that llguidance reads.

    Takes long for large schemas. Raises InvalidRequest for schemas that cannot be enforced.
    """
    offer = request.offer
    family = request.family
    token_of = request.token_ids.get
    rules: list[str] = []
    schemas: list[dict[str, Any]] = []
    if family is None or not offer.tools:
        body = "@answer"
    elif offer.choice == "required":
        body = _calls(offer, family, family.opening, rules, schemas, token_of)
    elif request.answer:
        body = f"{_calls(offer, family, family.opening, rules, schemas, token_of)} | @answer"
    else:
        body = _text_or_calls(offer, family, rules, schemas, token_of)
    start = _after_reasoning(request.marks, request.in_reasoning, rules, token_of)
    lark = "\n".join(("%llguidance {}", f"start: {start}", f"body: {body}", *rules, TEXT, ""))
    grammars = [{"name": "calls", "lark_grammar": lark}, *schemas]
    if "@answer" in body:
        grammars.append({**json.loads(request.answer)["grammars"][0], "name": "answer"})
    return _checked(grammars)


def _calls(
    offer: ToolOffer,
    family: CallFamily,
    opening: str,
    rules: list[str],
    schemas: list[dict[str, Any]],
    token_of: TokenOf,
) -> str:
    """Add the rules of calls to `rules` and `schemas`. Return the right side of the rule of one or several calls, with
    the texts around them.
    """
    call = _call_rules(offer, family, rules, schemas, token_of)
    opening = _spell(opening, token_of)
    between = _spell(family.between, token_of)
    closing = _spell(family.closing, token_of)
    if offer.max_calls == 1 and family.bare:
        return call
    if offer.max_calls == 1:
        return f"{opening} {call} {closing}"
    if family.bare:
        return f"{call} | {opening} {call} ({between} {call}){{1,{MAX_CALLS - 1}}} {closing}"
    return f"{opening} {call} ({between} {call}){{0,{MAX_CALLS - 1}}} {closing}"


def _text_or_calls(
    offer: ToolOffer, family: CallFamily, rules: list[str], schemas: list[dict[str, Any]], token_of: TokenOf
) -> str:
    """Return the right side of the rule of an output that is text, text and calls behind the family's marker, or, in a
    bare family, calls alone.
    """
    text = "TEXT"
    if family.bare:
        text = "FREE"
    opening = family.opening.removeprefix(family.marker or "")
    ways = [text]
    if family.marker is not None:
        ways.append(f"{_text_up_to('lead', family.marker, rules, token_of, text)} calls")
    if family.bare:
        ways.append("calls")
        rules.append(FREE)
    rules.append(f"calls: {_calls(offer, family, opening, rules, schemas, token_of)}")
    return " | ".join(ways)


def _call_rules(
    offer: ToolOffer, family: CallFamily, rules: list[str], schemas: list[dict[str, Any]], token_of: TokenOf
) -> str:
    names = []
    for index, tool in offer.callable_tools:
        text = family.head.replace(NAME, tool.name)
        if family.bare:
            # In pieces of JSON, as the output may be other JSON: the lexer does not go back behind a lexeme's start.
            head = " ".join(map(_quoted, _JSON.findall(text)))
        else:
            head = _spell(text, token_of)
        rules.append(f"call_{index}: {head} @tool_{index} {_spell(family.tail, token_of)}")
        schemas.append({"name": f"tool_{index}", "json_schema": _schema(index, tool, offer)})
        names.append(f"call_{index}")
    rules.append(f"call: {' | '.join(names)}")
    return "call"


def _schema(index: int, tool: Tool, offer: ToolOffer) -> Any:
    """Return the schema of a tool's arguments that is enforced.

    For a tool that is not strict, it is any object if its own schema cannot be enforced, and else has no properties
    that its own does not name.
    """
    param = tool.place(index)
    schema = tool.parameters or NO_PARAMETERS
    if not tool.strict:
        if offer.choice == "auto":
            schema = ANY_OBJECT
        elif "properties" in schema:
            schema = {"additionalProperties": False, **schema}
    try:
        return json.loads(schema_text({"type": "object", **schema}, param, strict=bool(tool.strict)))
    except InvalidRequest:
        if tool.strict:
            raise
        return json.loads(schema_text(ANY_OBJECT, param, strict=False))


def _after_reasoning(marks: Marks | None, in_reasoning: bool, rules: list[str], token_of: TokenOf) -> str:
    if marks is None:
        return "body"
    rules.append(r"GAP: /[ \n]{0,2}/")
    thought = f"{_text_up_to('thought', marks[1], rules, token_of)} GAP body"
    if in_reasoning:
        return thought
    return f"body | {_spell(marks[0], token_of)} {thought}"


def _text_up_to(rule: str, marker: str, rules: list[str], token_of: TokenOf, text: str = "TEXT") -> str:
    """Add rules named after `rule`. Return the name of the rule of text up to and with the first `marker`.

    The reader finds the marker by its text, whatever tokens wrote it, so the grammar does as well: a lazy lexeme ends
    there. If the marker is a control token, which is no text to a grammar, either one ends the text.
    """
    rules.append(f"{rule}_text[lazy]: {text} {_quoted(marker)}")
    if token_of(marker) is None:
        return f"{rule}_text"
    rules.append(f"{rule}: {rule}_text | {text} {_spell(marker, token_of)}")
    return rule


def _spell(text: str, token_of: TokenOf) -> str:
    # '<tool_call>\n' with the token <tool_call> of id 7: <[7]> "\n"
    parts = []
    begin = 0
    for found in MARKER.finditer(text):
        token_id = token_of(found[0])
        if token_id is not None:
            parts.append(_quoted(text[begin : found.start()]))
            parts.append(f"<[{token_id}]>")
            begin = found.end()
    parts.append(_quoted(text[begin:]))
    return " ".join(part for part in parts if part)


def _quoted(text: str) -> str:
    if not text:
        return ""
    return json.dumps(text, ensure_ascii=False)


def _checked(grammars: list[dict[str, Any]]) -> str:
    """Return the grammars as one text. Raises InvalidRequest if they are too large together: each alone is checked
    already.
    """
    text = json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"tools make a grammar of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; offer fewer",
            param="tools",
        )
    # The check has a tokenizer of bytes and one marker, which stands for all control tokens here.
    error = error_of(_TOKEN_ID.sub(f"<[{MARKER_ID}]>", text))
    if error:
        raise InvalidRequest(f"tools cannot be enforced together: {error}; offer fewer", param="tools")
    return text
