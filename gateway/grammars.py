"""Converts a caller's output format to the grammar that workers enforce.

The format is a JSON schema, a regular expression, a list of texts or a grammar. The result is a grammar in llguidance's
format. If a part of the format cannot be enforced, the format is refused and the error names the part. llguidance
itself would ignore unknown keywords. All of it runs in the processes of `gateway.grammar_checker`, within a limit of
CPU time and memory.
"""

from __future__ import annotations

import json
import re
import reprlib
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from gateway.json_schema_parts import MAX_DEPTH, Schema, SchemaPath, SchemaRefused, children, moved, pointer
from gateway.json_schemas import read_schema
from gateway.output_format import OutputFormat
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.grammar_limits import MAX_ITEMS_IN_ROW, limit_reached, parser_limits
from outrider.wire.requests.params import MAX_GRAMMAR_BYTES

MARKER_ID = 257
"""Id of a token without text that stands for all of the model's control tokens while a grammar of tool calls is
checked. Grammars are checked with a tokenizer that has one token for each byte, an end token, and this one."""
LAYOUT: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": r'"\bfnrt',
}
"""Options of llguidance for the layout of JSON in an output. At most one space follows a comma or a colon, and no other
white space stands outside strings: models write JSON so, and could go on with white space without end. Escapes such as
\\u0061 are not allowed, because llguidance takes a key with it for another key than the one with `a`. A control
character that JSON writes only as such an escape is therefore allowed only if the schema contains it."""
MAX_ECHO_CHARS = 300
"""Maximal number of characters of llguidance's error that a refusal quotes."""
LOCATE_S = 0.02
"""Limit of CPU time for finding which part of a schema causes a refusal, in seconds: 2 % of the default limit of a
whole check, one second."""
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/[a-z]*'
    r"|(?P<json>%json\b\s*)|(?P<option>\b(?:max_tokens|temperature|stop|stop_capture)\b(?=\s*=))"
    r"|(?P<special><[^<>\s]+>)"
)
"""Parts of a Lark grammar: strings, comments and regular expressions, which are skipped, and the constructs that are
checked."""


def grammar_of(output: OutputFormat) -> str:
    """Return the grammar of an output format, as llguidance reads it. Raises InvalidRequest if the format is invalid,
    or if a part of it cannot be enforced.
    """
    value = output.value
    param = output.param
    if output.kind == "json":
        return create_schema_grammar(value, param, strict=output.strict)
    if output.kind == "json_object":
        return create_json_object_grammar(param)
    if output.kind == "regex":
        return create_regex_grammar(value, param)
    if output.kind == "choice":
        return create_choice_grammar(value, param)
    return parse_lark_grammar(value, param)


def create_schema_grammar(schema: Schema | str, param: str, *, strict: bool) -> str:
    """Return the grammar of JSON texts that are valid under `schema`: a JSON Schema (2020-12) or its text.

    param: name of the request's field, for errors. strict: whether the schema itself must also follow OpenAI's rules:
    every property is required, and no others are allowed. The output follows the schema in either case.

    Raises InvalidRequest, which names the faulty part of the schema by its path below `param`.
    """
    return _placed(lambda: _grammar_of_schema(_json_text(schema), strict), param)


def schema_text(schema: Schema | str, param: str, *, strict: bool) -> str:
    """Check a JSON Schema or its text, and return the JSON to write after `%json` in a Lark grammar.

    param: name of the request's field, for errors. strict: whether the schema itself must also follow OpenAI's rules:
    every property is required, and no others are allowed.

    Raises InvalidRequest, which names the faulty part of the schema by its path below `param`.
    """
    return _schema_of(create_schema_grammar(schema, param, strict=strict))


def create_json_object_grammar(param: str) -> str:
    """Return the grammar of any JSON object. param: name of the request's field, for errors."""
    return create_schema_grammar({"type": "object"}, param, strict=False)


def create_regex_grammar(pattern: str, param: str) -> str:
    """Return the grammar of texts that the regular expression, in the syntax of Rust's `regex`, matches as a whole.

    param: name of the request's field, for errors. Raises InvalidRequest for an invalid or too large expression.
    """
    return _placed(lambda: _grammar_of_regex(pattern), param)


def create_choice_grammar(choices: list[str], param: str) -> str:
    """Return the grammar that allows exactly these texts.

    param: name of the request's field, for errors. Raises InvalidRequest if there are none, too many or too long ones.
    """
    return _placed(lambda: _grammar_of_choices(choices), param)


def parse_lark_grammar(text: str, param: str) -> str:
    """Return the grammar for a text in GBNF (`root ::= ...`) or in llguidance's dialect of Lark.

    JSON schemas after `%json` in the text are checked like those of requests. param: name of the request's field, for
    errors. Raises InvalidRequest for a text that is invalid or too large, or has a special token or an option that is
    not offered.
    """
    return _placed(lambda: _grammar_of_lark(text), param)


def _placed(work: Callable[[], str], param: str) -> str:
    try:
        grammar = work()
    except SchemaRefused as refused:
        path = param + "".join(map(_step, refused.path))
        raise InvalidRequest(f"{path} {refused.reason}", param=path) from None
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        text = f"{param} makes a grammar of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; make it smaller"
        raise InvalidRequest(text, param=param)
    return grammar


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    if re.fullmatch(r"[\w$%-]{1,64}", key):
        return f".{key}"
    return f"[{reprlib.repr(key)}]"


def _utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SchemaRefused("holds half a character (a lone surrogate); send valid Unicode") from None


# Schemas


def _json_text(schema: Schema | str) -> str:
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise SchemaRefused(f"nests too deep, at most {MAX_DEPTH} levels are allowed (MAX_DEPTH)") from None
    except ValueError as error:
        raise SchemaRefused(f"is no JSON: {error}") from None
    _utf8(text)
    return text


def _grammar_of_schema(text: str, strict: bool) -> str:
    schema = read_schema(json.loads(text), strict=strict)
    began_s = time.thread_time()
    grammar = _compiled(schema)
    if error := error_of(grammar):
        path: SchemaPath = ()
        if time.thread_time() < began_s + LOCATE_S:
            path = _located(schema, error)
        raise SchemaRefused(f"cannot be enforced: {error}", *path)
    _check_wide(schema)
    return grammar


def _check_wide(schema: Schema) -> None:
    """Refuses objects with more properties than one step can examine.

    Each is tried alone, because the first steps of the whole schema meet the outermost object alone.
    """
    whole: Schema | None = None
    for path, wide in _objects(schema):
        if len(wide["properties"]) <= MAX_ITEMS_IN_ROW // 8:
            continue
        whole = whole or moved(schema, "/$defs/whole")
        alone = moved({**wide, "type": "object", "$defs": {}}, "/$defs/whole")
        assert isinstance(alone, dict)
        error = error_of(_compiled({**alone, "$defs": {"whole": whole}}))
        if "MAX_ITEMS_IN_ROW" in error:
            raise SchemaRefused(f"cannot be enforced: {error}", *path)


def _objects(schema: Schema) -> Iterator[tuple[SchemaPath, dict[str, Any]]]:
    """Skips an outermost object, which the first steps of the whole have examined."""
    pending: list[tuple[SchemaPath, Schema]] = [((), schema)]
    while pending:
        path, current = pending.pop()
        for step, child in children(current):
            pending.append(((*path, *step), child))
        if isinstance(current, bool) or "properties" not in current:
            continue
        is_outermost = not path and current.get("type") == "object"
        if not is_outermost:
            yield path, current


def _compiled(schema: Schema) -> str:
    if schema is True:
        schema = {}
    elif schema is False:
        schema = {"enum": []}
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=LAYOUT)
    return grammar


def _located(schema: Schema, error: str) -> SchemaPath:
    """The schema at each path is tried alone, with the whole schema beside it for its references, as deep as the time
    allows.

    # the path with the same error: () -> ("properties", "a") -> ("properties", "a", "items"), whose children are sound
    """
    until_s = time.thread_time() + LOCATE_S
    definitions = {"whole": moved(schema, "/$defs/whole")}
    path: SchemaPath = ()
    candidates = children(schema)
    while (candidate := next(candidates, None)) is not None and time.thread_time() < until_s:
        step, child = candidate
        below = (*path, *step)
        if error_of(_compiled({"$defs": definitions, "$ref": f"#/$defs/whole{pointer(below)}"})) == error:
            path = below
            candidates = children(child)
    return path


# Expressions, choices, grammars


def _grammar_of_regex(pattern: str) -> str:
    _utf8(pattern)
    return _checked(LLMatcher.grammar_from_regex(pattern))


def _grammar_of_choices(choices: list[str]) -> str:
    if not choices:
        raise SchemaRefused("is an empty list, give at least one choice")
    for index, choice in enumerate(choices):
        if not choice:
            raise SchemaRefused("is empty, must have at least one character", index)
    _utf8("".join(choices))
    return _checked(LLMatcher.grammar_from_regex("|".join(map(_literal, choices))))


def _literal(text: str) -> str:
    """The text as an expression that matches it alone.

    # "a.b" is a\\x2eb
    """
    expression = ""
    for char in text:
        if char.isalnum() or ord(char) >= 0x80:
            expression += char
        else:
            expression += f"\\x{ord(char):02x}"
    return expression


def _grammar_of_lark(text: str) -> str:
    _utf8(text)
    if not is_lark_syntax(text):
        text = _lark_of_gbnf(text)
    parts: list[str] = []
    begin = num_schemas = 0
    while found := _LARK.search(text, begin):
        parts.append(text[begin : found.end()])
        begin = found.end()
        if found["json"]:
            schema, begin = _schema_at(text, begin, ("%json", num_schemas))
            parts.append(schema)
            num_schemas += 1
        elif found["option"]:
            raise SchemaRefused(f"has the option {found['option']}, which is not offered; leave it out")
        elif found["special"]:
            raise SchemaRefused(
                f"names the special token {reprlib.repr(found['special'])}; special tokens are never text"
            )
    lark = "".join((*parts, text[begin:]))
    return _checked(json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False))


def _schema_at(text: str, begin: int, path: SchemaPath) -> tuple[str, int]:
    try:
        schema, end = json.JSONDecoder().raw_decode(text, begin)
        if isinstance(schema, dict) and schema.get("x-guidance") == LAYOUT:  # from `schema_text`
            del schema["x-guidance"]
        return _schema_of(_grammar_of_schema(_json_text(schema), False)), end
    except (ValueError, RecursionError) as error:
        raise SchemaRefused(f"is no JSON: {error}", *path) from None
    except SchemaRefused as refused:
        raise SchemaRefused(refused.reason, *path, *refused.path) from None


def _schema_of(grammar: str) -> str:
    return json.dumps(json.loads(grammar)["grammars"][0]["json_schema"], ensure_ascii=False, separators=(",", ":"))


def _lark_of_gbnf(text: str) -> str:
    try:
        lark: str = gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, text))
    except Exception as error:  # the library raises plain Exception, and IndexError at an early end
        raise SchemaRefused(
            f"is neither Lark (start: ...) nor GBNF (root ::= ...): {str(error)[:MAX_ECHO_CHARS]}"
        ) from None
    return lark


_GBNF_ESCAPE = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")


def _unescaped(found: re.Match[str]) -> str:
    # The library cuts the zeros of \u0041 and then reads further digits, so escapes are resolved before.
    digits = found[1] or found[2]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise ValueError(f"{found[0]} is no character")
    return chr(code)


# llguidance


def _checked(grammar: str) -> str:
    if error := error_of(grammar):
        raise SchemaRefused(f"cannot be enforced: {error}")
    return grammar


def error_of(grammar: str) -> str:
    """Return llguidance's error for a grammar, or an empty text if it can be compiled and used.

    Some errors show only in use. So the bytes that the grammar allows first are computed, too, and if it allows only
    one beginning, such as the `{` of an object, those that it allows after that.
    """
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=LLParserLimits(**parser_limits()))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error() and (forced := matcher.compute_ff_tokens()):
        matcher.consume_tokens(forced)
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    return _one_line(matcher.get_error())


def _one_line(error: str) -> str:
    if error.startswith("NoExtension"):
        return "nothing can satisfy it"
    if (reached := limit_reached(error)) is not None:
        return reached
    line = re.sub(r"(:| while processing)? json-schema://\S*", "", " ".join(error.split()))
    if len(line) > MAX_ECHO_CHARS:
        line = f"{line[:MAX_ECHO_CHARS]}..."
    return line


class _Bytes:
    """A tokenizer of bytes: what a grammar allows does not depend on how its texts are tokenised."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"<marker>")
    special_token_ids = (256, MARKER_ID)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
