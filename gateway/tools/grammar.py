"""What an answer with tools has to be, as a grammar for the workers, in the words of the model's family.

Each schema is checked and written by `gateway.grammars`; what stands around them is Lark as llguidance reads it. A
marker that is a token of its own is named by its id: as text it would be other tokens. What ends free text, the end of
the reasoning and a call's marker, counts as text, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from gateway.grammars import MARKER_ID, error_of, schema_text
from gateway.tools.families import MARKER, NAME, Family, Marks
from gateway.tools.grammar_request import ToolGrammarRequest
from gateway.tools.offer import NO_PARAMETERS, Tool, ToolOffer
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import MAX_GRAMMAR_BYTES

TokenOf = Callable[[str], int | None]
"""The id of a text that is one token and no text to a grammar; None for other texts."""
MAX_CALLS = 16
"""Calls of one answer that is bound, so that a model that goes on calling comes to an end."""
TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"[\s\x1c-\x1f]*"
"""White space as Python's, which the reader skips."""
FREE = rf"FREE: /{_SPACE}(\[{_SPACE}\[(.|\n)*|(\[{_SPACE})?([^\s\x1c-\x1f{{\[](.|\n)*)?)/"
"""Text that is no call where calls need no marker: it begins neither with an object nor with a list of them."""
_JSON = re.compile(r'"[^"]*"|[{}]|[:,] ')
_TOKEN_ID = re.compile(r"<\[\d+\]>")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def tool_grammar(request: ToolGrammarRequest) -> str:
    """Return the grammar of a whole answer. Takes long for large schemas. Raises InvalidRequest."""
    offer = request.offer
    family = request.family
    marks = request.marks
    answer = request.answer
    token_of = request.token_ids.get
    rules: list[str] = []
    schemas: list[dict[str, Any]] = []
    if family is None or not offer.tools:
        body = "@answer"
    elif offer.choice == "required":
        body = _calls(offer, family, family.opening, rules, schemas, token_of)
    elif answer:
        body = f"{_calls(offer, family, family.opening, rules, schemas, token_of)} | @answer"
    else:
        body = _text_or_calls(offer, family, rules, schemas, token_of)
    lines = ["%llguidance {}", f"start: {_after_reasoning(marks, request.in_reasoning, offer, rules, token_of)}"]
    lark = "\n".join((*lines, f"body: {body}", *rules, TEXT, ""))
    grammars = [{"name": "calls", "lark_grammar": lark}, *schemas]
    if "@answer" in body:
        grammars.append({**json.loads(answer)["grammars"][0], "name": "answer"})
    return _checked(grammars)


def _calls(
    offer: ToolOffer,
    family: Family,
    opening: str,
    rules: list[str],
    schemas: list[dict[str, Any]],
    token_of: TokenOf,
) -> str:
    """Add the rules of calls. Return what one or several are, from the first character to the last."""
    call = _call_rules(offer, family, rules, schemas, token_of)
    opening, between, closing = (_spell(text, token_of) for text in (opening, family.between, family.closing))
    if offer.max_calls == 1:
        return call if family.bare else f"{opening} {call} {closing}"
    if family.bare:
        return f"{call} | {opening} {call} ({between} {call}){{1,{MAX_CALLS - 1}}} {closing}"
    return f"{opening} {call} ({between} {call}){{0,{MAX_CALLS - 1}}} {closing}"


def _text_or_calls(
    offer: ToolOffer, family: Family, rules: list[str], schemas: list[dict[str, Any]], token_of: TokenOf
) -> str:
    """Return what an answer is that is text, and calls behind the family's marker if there is one; or, of a bare
    family, calls alone.
    """
    text = "FREE" if family.bare else "TEXT"
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
    offer: ToolOffer, family: Family, rules: list[str], schemas: list[dict[str, Any]], token_of: TokenOf
) -> str:
    names = []
    for at, tool in offer.callable_tools:
        text = family.head.replace(NAME, tool.name)
        # In the pieces of JSON where an answer may be other JSON: the lexer looks back at no lexeme that it began.
        head = " ".join(map(_quoted, _JSON.findall(text))) if family.bare else _spell(text, token_of)
        rules.append(f"call_{at}: {head} @tool_{at} {_spell(family.tail, token_of)}")
        schemas.append({"name": f"tool_{at}", "json_schema": _schema(at, tool, offer)})
        names.append(f"call_{at}")
    rules.append(f"call: {' | '.join(names)}")
    return "call"


def _schema(at: int, tool: Tool, offer: ToolOffer) -> Any:
    """Return what a tool's arguments have to be. Of one that is not strict it is what can be enforced: any object where
    its schema cannot, and no properties that the schema does not name.
    """
    param = tool.place(at)
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


def _after_reasoning(
    marks: Marks | None, in_reasoning: bool, offer: ToolOffer, rules: list[str], token_of: TokenOf
) -> str:
    if marks is None:
        return "body"
    rules.append(r"GAP: /[ \n]{0,2}/")
    thought = f"{_text_up_to('thought', marks[1], rules, token_of)} GAP body"
    return thought if in_reasoning else f"body | {_spell(marks[0], token_of)} {thought}"


def _text_up_to(rule: str, marker: str, rules: list[str], token_of: TokenOf, text: str = "TEXT") -> str:
    """Return text that ends with the first marker, as the reader finds it: by its text, whatever tokens write that. A
    lazy lexeme ends there. Where the marker is a token, which is no text to a grammar, either may be.
    """
    rules.append(f"{rule}_text[lazy]: {text} {_quoted(marker)}")
    if token_of(marker) is None:
        return f"{rule}_text"
    rules.append(f"{rule}: {rule}_text | {text} {_spell(marker, token_of)}")
    return rule


def _spell(text: str, token_of: TokenOf) -> str:
    """Return the text in Lark: quoted, and tokens by their ids."""
    parts, begin = [], 0
    for found in MARKER.finditer(text):
        if (token_id := token_of(found[0])) is not None:
            parts += [_quoted(text[begin : found.start()]), f"<[{token_id}]>"]
            begin = found.end()
    return " ".join(part for part in (*parts, _quoted(text[begin:])) if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _checked(grammars: list[dict[str, Any]]) -> str:
    """Return them as one text. Raises InvalidRequest when they are too much together; each is checked already.

    Tokens are all one here, whose id the tokenizer of bytes has.
    """
    text = json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"tools make a grammar of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; offer fewer",
            param="tools",
        )
    error = error_of(_TOKEN_ID.sub(f"<[{MARKER_ID}]>", text))
    if error:
        raise InvalidRequest(f"tools cannot be enforced together: {error}; offer fewer", param="tools")
    return text
