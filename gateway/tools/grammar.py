"""What an answer with tools has to be, as a grammar for the workers, in the words of the model's family.

Each schema is checked and written by `gateway.grammars`; what stands around them is Lark as llguidance reads it. A
marker that is a token of its own is named by its id: as text it would be other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits

from gateway.grammars import schema_text
from gateway.tools.families import MARKER, NAME, Family, Marks
from gateway.tools.offer import NO_PARAMETERS, Tool, ToolOffer
from outrider.wire.errors import InvalidRequest
from outrider.wire.params import MAX_GRAMMAR_BYTES

TokenOf = Callable[[str], int | None]
"""The id of a text that is one token and no text to a grammar; None for other texts."""
MAX_CALLS = 16
"""Calls of one answer that is bound. A model that cannot stop calling says twice as much with this doubled."""
NUM_CACHED = 16
"""Grammars that are kept, each with what it was made of: 0.6 MiB at most. Doubled, so is that."""
TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"[\s\x1c-\x1f]*"
"""White space as Python's, which the reader skips."""
FREE = rf"FREE: /{_SPACE}(\[{_SPACE}\[(.|\n)*|(\[{_SPACE})?([^\s\x1c-\x1f{{\[](.|\n)*)?)/"
"""Text that is no call where calls need no marker: it begins neither with an object nor with a list of them."""
_JSON = re.compile(r'"[^"]*"|[{}]|[:,] ')
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def grammar_of(
    offer: ToolOffer, family: Family | None, marks: Marks | None, in_reasoning: bool, answer: str, token_of: TokenOf
) -> str:
    """Return the grammar of a whole answer, empty where it may be anything. Takes long for large schemas.

    family: None = no calls. marks: of the reasoning that may come before all else, None = there is none; in_reasoning:
    the prompt began it. answer: the grammar of an answer that is no call, empty = any. Raises InvalidRequest.
    """
    tools = json.dumps([(each.name, None, each.parameters, each.strict, each.schema_field) for each in offer.tools])
    return _grammar_of(tools, offer.choice, offer.named, offer.parallel, family, marks, in_reasoning, answer, token_of)


@lru_cache(NUM_CACHED)
def _grammar_of(
    tools: str,
    choice: Literal["auto", "required"],
    named: str | None,
    parallel: bool,
    family: Family | None,
    marks: Marks | None,
    in_reasoning: bool,
    answer: str,
    token_of: TokenOf,
) -> str:
    """Make it whole or find it: schema by schema, a request with more of them than are kept would find none.

    tools: as JSON, for the order of properties counts.
    """
    offer = ToolOffer(tuple(Tool(*each) for each in json.loads(tools)), choice, named, parallel)
    rules: list[str] = []
    schemas: list[dict[str, Any]] = []
    if family is None or not offer.tools:
        body = "@answer" if answer else ""
    elif offer.choice == "required":
        body = _calls(offer, family, family.opening, rules, schemas, token_of)
    elif answer:
        body = f"{_calls(offer, family, family.opening, rules, schemas, token_of)} | @answer"
    elif _binds(offer):
        body = _text_or_calls(offer, family, rules, schemas, token_of)
    else:
        body = ""
    if not body or (body == "@answer" and marks is None):
        return answer
    lines = ["%llguidance {}", f"start: {_after_reasoning(marks, in_reasoning, offer, rules, token_of)}"]
    lark = "\n".join((*lines, f"body: {body}", *rules, TEXT, ""))
    grammars = [{"name": "calls", "lark_grammar": lark}, *schemas]
    if "@answer" in body:
        grammars.append({**json.loads(answer)["grammars"][0], "name": "answer"})
    return _checked(grammars)


def _binds(offer: ToolOffer) -> bool:
    """Whether an answer that may be without calls is bound if it has some."""
    return any(tool.strict for tool in offer.tools) or offer.max_calls is not None


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
    param = f"tools[{at}].{tool.schema_field}"
    schema = tool.parameters or NO_PARAMETERS
    if not tool.strict:
        if offer.choice == "auto":
            schema = ANY_OBJECT
        elif "properties" in schema:
            schema = {"additionalProperties": False, **schema}
    try:
        return json.loads(schema_text({"type": "object", **schema}, param, strict=tool.strict))
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
    """Return text that ends with the first marker. A lazy lexeme ends there; a token is no text in any case."""
    if token_of(marker) is not None:
        return f"{text} {_spell(marker, token_of)}"
    rules.append(f"{rule}[lazy]: {text} {_spell(marker, token_of)}")
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
    """Return them as one text. Raises InvalidRequest when they are too much together; each is checked already."""
    text = json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"tools make a grammar of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; offer fewer",
            param="tools",
        )
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=LLParserLimits())
    if is_error:
        raise InvalidRequest(f"tools cannot be enforced together: {messages[0]:.300}; offer fewer", param="tools")
    return text
