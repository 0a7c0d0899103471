"""Makes the grammar of an output with tools, to which the target worker holds the model.

`gateway.grammar_work` calls `tool_grammar` in a process of its own. `gateway.grammars` checks and writes the schema of
each tool; the texts of the model's family around them are written here, in the Lark of llguidance. A marker that is one
token is named by its id, as its text would be other tokens. The end of the reasoning and the marker of calls are also
recognised as text, since a model may write them with other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from gateway.grammars import MARKER_ID, error_of, schema_text
from gateway.tools.call_families import CallFamily
from gateway.tools.cursor import MARKER
from gateway.tools.forms.form import LarkGrammar
from gateway.tools.grammar_request import ToolGrammarRequest
from gateway.tools.offer import NO_PARAMETERS, Tool, ToolOffer
from gateway.tools.reasoning import ReasoningFamily
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import MAX_GRAMMAR_BYTES

TokenOf = Callable[[str], int | None]
"""Type of a function that returns the id of the control token with the given text, or None if there is none."""
MAX_CALLS = 16
"""Maximum number of calls in one output that a grammar allows. It stops a model that would go on with calls forever."""
TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"[\s\x1c-\x1f]*"
"""White space that `str.strip` removes, as the reader does."""
FREE = rf"FREE: /{_SPACE}(\[{_SPACE}\[(.|\n)*|(\[{_SPACE})?([^\s\x1c-\x1f{{\[](.|\n)*)?)/"
"""Lark terminal of an answer in families whose calls may stand without a marker. So that the answer is not read as a
call, it begins neither with a JSON object nor with a list of objects."""
FREE_OF_LISTS = rf"FREE: /{_SPACE}([^\s\x1c-\x1f\[](.|\n)*)?/"
"""Lark terminal of an answer in families whose calls may stand without a marker, always in a list. So that the answer
is not read as a call, it does not begin with a `[`."""
_BETWEEN_TAGS = re.compile(r"(?<=>)\n(?=<\w+>)")
"""The line break between the tag that closes a call and the one that opens the next. Some templates write none."""
_TOKEN_ID = re.compile(r"(<\[\^?)\d+(\]>)")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def tool_grammar(request: ToolGrammarRequest) -> str:
    """Return the grammar of a whole output with reasoning, text and calls, as JSON that llguidance reads.

    This takes long for large schemas. Raises InvalidRequest if the schema of a strict tool cannot be enforced, or if
    the whole grammar is too large or cannot be compiled.
    """
    grammar = _new_grammar(request)
    start = _start(request, _body(request, grammar), grammar)
    lark = "\n".join(("%llguidance {}", f"start: {start}", *grammar.rules, TEXT, ""))
    grammars = [{"name": "calls", "lark_grammar": lark}, *grammar.schemas]
    if "@answer" in lark:
        grammars.append({**json.loads(request.answer)["grammars"][0], "name": "answer"})
    return _checked(grammars, has_tools=bool(request.offer.tools))


def _new_grammar(request: ToolGrammarRequest) -> LarkGrammar:
    token_of = request.token_ids.get
    rules = list[str]()

    def text_up_to(rule: str, marker: str) -> str:
        return _text_up_to(rule, marker, rules, token_of)

    return LarkGrammar(lambda text: _spell(text, token_of), text_up_to, rules)


def _body(request: ToolGrammarRequest, grammar: LarkGrammar) -> str:
    """Return the right side of the rule of an output without its reasoning."""
    offer = request.offer
    family = request.family
    reasoning = request.reasoning
    if reasoning is not None and _is_unbound(request, reasoning):
        return _unbound(reasoning, grammar)
    if family is None or not offer.tools:
        return _answer(request, grammar)
    if offer.choice == "required":
        return _calls(offer, family, grammar)
    if request.answer:
        return f"{_calls(offer, family, grammar)} | {_answer(request, grammar)}"
    return _text_or_calls(request, family, grammar)


def _is_unbound(request: ToolGrammarRequest, reasoning: ReasoningFamily) -> bool:
    """Return whether the grammar bounds the reasoning alone."""
    return not request.binds_answer and not reasoning.answer_start


def _answer(request: ToolGrammarRequest, grammar: LarkGrammar) -> str:
    reasoning = request.reasoning
    answer = "@answer"
    if not request.answer:
        answer = "TEXT"
    if reasoning is None or not reasoning.answer_start:
        return answer
    return f"{grammar.spell(reasoning.answer_start)} {answer}"


def _unbound(reasoning: ReasoningFamily, grammar: LarkGrammar) -> str:
    """Return the right side of the rule of any tokens but those that begin reasoning."""
    # <think> is the token 7: <[^7]>*
    first = _TOKEN_ID.match(grammar.spell(reasoning.marks[0]))
    assert first is not None, "reading_of has checked it"
    return f"{first[0].replace('[', '[^')}*"


def _calls(offer: ToolOffer, family: CallFamily, grammar: LarkGrammar, *, is_marked: bool = False) -> str:
    """Return the right side of the rule of one or several calls, with the texts around them.

    `is_marked`: the family's marker stands in front already.
    """
    for index, tool in offer.callable_tools:
        rest = family.form.rest(tool.name, _schema(index, tool, offer), f"tool_{index}", grammar)
        grammar.rules.append(f"call_{index}: {rest}")
    kind = "first"
    if is_marked:
        kind = "marked"
    first = _call_rule(offer, family, kind, family.opening, grammar)
    closing = grammar.spell(family.closing)
    if family.is_bare and not family.lists_one:
        alone = _call_rule(offer, family, "alone", "", grammar)
        if offer.max_calls == 1:
            return alone
        further = _call_rule(offer, family, "further", family.between, grammar)
        return f"{alone} | {first} {further}{{0,{MAX_CALLS - 1}}} {closing}"
    if offer.max_calls == 1:
        return f"{first} {closing}"
    further = _call_rule(offer, family, "further", family.between, grammar)
    return f"{first} {further}{{0,{MAX_CALLS - 1}}} {closing}"


def _text_or_calls(request: ToolGrammarRequest, family: CallFamily, grammar: LarkGrammar) -> str:
    """Return the right side of the rule of an output that is text, text and calls behind the family's marker, or, in a
    bare family, calls alone.
    """
    reasoning = request.reasoning
    if reasoning is not None and reasoning.answer_start:
        return f"{grammar.spell(reasoning.answer_start)} TEXT | {_calls(request.offer, family, grammar)}"
    text = "TEXT"
    if family.is_bare:
        text = "FREE"
        grammar.rules.append(FREE_OF_LISTS if family.lists_one else FREE)
    elif len(family.markers) > 1:
        text = "UNMARKED"
        grammar.rules.append(_text_without(text, family.markers[1:]))
    marker = family.marker
    ways = [text]
    if marker is not None:
        ways.append(f"{_text_up_to('lead', marker, grammar.rules, request.token_ids.get, text)} calls")
    if family.is_bare:
        ways.append("calls")
    grammar.rules.append(f"calls: {_calls(request.offer, family, grammar, is_marked=not family.is_bare)}")
    return " | ".join(ways)


def _call_rule(offer: ToolOffer, family: CallFamily, kind: str, before: str, grammar: LarkGrammar) -> str:
    """Add the rule `kind` of a call of any tool behind the text `before`. Return the name of the rule.

    `before` is one lexeme with the call's head: the lexer does not go back behind a lexeme's start.
    """
    # between "\n", closing "\n</calls>": "\n<call a" and "\n</calls>" are told apart, "\n" alone ends too soon
    names = list[str]()
    for index, tool in offer.callable_tools:
        head = before + family.form.head(tool.name)
        if kind == "marked":
            head = head.removeprefix(family.marker or "")
        heads = grammar.spell(head)
        joined = _BETWEEN_TAGS.sub("", head)
        if kind == "further" and joined != head:
            heads = f"({heads} | {grammar.spell(joined)})"
        names.append(f"{heads} call_{index}")
    grammar.rules.append(f"{kind}: {' | '.join(names)}")
    return kind


def _schema(index: int, tool: Tool, offer: ToolOffer) -> Any:
    """Return the schema of a tool's arguments that is enforced.

    For a tool that is not strict, it is any object if its own schema cannot be enforced, and else has no properties
    that its own does not name.
    """
    param = tool.path(index)
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


def _start(request: ToolGrammarRequest, body: str, grammar: LarkGrammar) -> str:
    """Return the right side of the first rule: the body, behind reasoning if there is some. Adds the body's rule."""
    grammar.rules.insert(0, f"body: {body}")
    reasoning = request.reasoning
    if reasoning is None:
        return "body"
    begin, end = reasoning.marks
    gap = grammar.spell(reasoning.turn)
    if not gap:
        gap = "GAP"
        grammar.rules.append(r"GAP: /[ \n]{0,2}/")
    if request.max_reasoning_tokens is None:
        text = grammar.text_up_to("thought", end)
    else:
        text = _bounded_thought(request.max_reasoning_tokens, end, grammar)
    thought = f"{text} {gap} body"
    if request.in_reasoning:
        return thought
    before = ""
    if request.max_reasoning_tokens is not None:
        before = _before_reasoning(request, reasoning, grammar)
    return f"body | {before} {grammar.spell(begin)} {thought}"


def _before_reasoning(request: ToolGrammarRequest, reasoning: ReasoningFamily, grammar: LarkGrammar) -> str:
    """Return the right side of the rule of what may stand in front of the reasoning: white space, as for the reader."""
    if _is_unbound(request, reasoning):
        return "body?"  # its rule of tokens takes the white space, so that a lexeme beside it would get none
    grammar.rules.append(f"SPACE: /{_SPACE}/")
    return "SPACE"


def _bounded_thought(max_tokens: int, end: str, grammar: LarkGrammar) -> str:
    """Add the rules of reasoning of at most `max_tokens` tokens. Return its rule with its end, which is a token."""
    if max_tokens == 0:
        return grammar.spell(end)
    text = re.escape(end).replace("/", r"\/")
    grammar.rules.append(rf"THOUGHT: /(.|\n)*/ & ~/(.|\n)*{text}(.|\n)*/")
    grammar.rules.append(f"thought[max_tokens={max_tokens}]: THOUGHT")
    return f"thought {grammar.spell(end)}"


def _text_without(rule: str, markers: Sequence[str]) -> str:
    """Return the rule of text that has none of the markers, which announce calls that no grammar would bind."""
    banned = "|".join(re.escape(marker).replace("/", r"\/") for marker in markers)
    return rf"{rule}: /(.|\n)*/ & ~/(.|\n)*({banned})(.|\n)*/"


def _text_up_to(rule: str, marker: str, rules: list[str], token_of: TokenOf, text: str = "TEXT") -> str:
    """Add rules named after `rule`. Return the name of the rule of text up to and with the first `marker`.

    The reader finds the marker by its text, whatever tokens wrote it, so the grammar does as well: a lazy lexeme ends
    there. If the marker is a control token, which is no text to a grammar, either one ends the text.
    """
    rules.append(f"{rule}_text[lazy]: {text} {_quoted(marker)}")
    spelled = _spell(marker.lstrip(), token_of)  # the text takes the white space in front of a token
    if spelled == _quoted(marker.lstrip()):
        return f"{rule}_text"
    rules.append(f"{rule}: {rule}_text | {text} {spelled}")
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


def _checked(grammars: list[dict[str, Any]], *, has_tools: bool) -> str:
    """Return the grammars as one text. Raises InvalidRequest if they are too large together: each alone is checked
    already.
    """
    text = json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
    num_bytes = len(text.encode())
    what = "reasoning and the form of the answer"
    remedy = "make that form simpler"
    param = None
    if has_tools:
        what = "tools"
        remedy = "offer fewer"
        param = "tools"
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{what} make a grammar of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; {remedy}",
            param=param,
        )
    # The check has a tokenizer of bytes and one marker, which stands for all control tokens here.
    error = error_of(_TOKEN_ID.sub(rf"\g<1>{MARKER_ID}\g<2>", text))
    if error:
        raise InvalidRequest(f"{what} cannot be enforced together: {error}; {remedy}", param=param)
    return text
