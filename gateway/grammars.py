"""What an answer has to be: from a caller's schema, expression, choices or grammar to the text that workers are given.

The text is a grammar as llguidance reads it. What it cannot enforce is refused with its place, and nothing is ignored
in silence: llguidance overlooks keywords that it does not know. Everything here takes up to 100 ms of CPU, so it is
called on a thread; `gateway.admission.requests` does that.
"""

from __future__ import annotations

import json
import re
import reprlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from outrider.wire.errors import InvalidRequest
from outrider.wire.params import MAX_GRAMMAR_BYTES

MAX_SCHEMA_BYTES = 64 << 10
"""UTF-8 bytes of a schema, as compact JSON. Doubled, reading one takes twice as long: 10 ms more."""
MAX_DEPTH = 32
"""Levels of schemas in schemas, and of lists and objects in a const. Doubled, a text nests deeper than parsers take."""
MAX_PROPERTIES = 512
"""Properties of all objects of a schema together. Doubled, compiling takes 40 ms more."""
MAX_ALTERNATIVES = 1024
"""Members of anyOf, oneOf, allOf, prefixItems, enum and type together. Doubled, compiling takes twice as long."""
MAX_COUNT = 10_000
"""Of minItems, maxItems, minLength, maxLength, minProperties, maxProperties, and of `{m,n}` in an expression. Doubled,
the workers keep twice the states for what repeats."""
MAX_REGEX_CHARS = 4096
"""Of an expression, or of the patterns of a schema together. Doubled, compiling takes twice as long."""
MAX_CHOICES = 1024
"""Doubled, compiling takes twice as long."""
MAX_CHOICES_CHARS = 32 << 10
"""Of all choices together. Doubled, compiling takes twice as long."""
MAX_LARK_BYTES = 32 << 10
"""UTF-8 bytes of a grammar as its caller wrote it. Doubled, reading one takes twice as long."""
MAX_INTEGER = 2**53
"""Beyond it a JSON number may not be what it says."""
NUM_CACHED = 64
"""Grammars of each kind that are kept when done, each with what it was made of: 128 KiB at most."""
LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own: how much it computes for one expression, grammar or step."""
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON has one space or none behind a comma or a colon and no other white space between tokens: both ways that models
write on one line, and no way to go on with spaces for ever."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    {"$schema", "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly"}
    | {"writeOnly", "contentMediaType", "contentEncoding", "discriminator"}
)
"""Keywords that constrain nothing; they are dropped."""
_SCHEMA = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NEUTRAL = {"uniqueItems": False, "nullable": False}
"""Keywords that are dropped with this value, and refused with another."""
MAX_ECHO_CHARS = 300
"""Of what llguidance says."""
_LOCATE_S = 0.05
"""Time on the search for what a refusal is about. Doubled, more of a large schema is searched."""
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/[a-z]*'
    r"|(?P<json>%json\b\s*)|(?P<option>\b(?:max_tokens|temperature|stop|stop_capture)\b(?=\s*=))|(?P<special><[^<>\s]+>)"
)
"""Strings, comments and expressions, which are passed over, and what is looked at."""

Schema = dict[str, Any] | bool
Kind = Literal["json", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the output has to be, as a caller says it."""

    kind: Kind
    value: Any
    """A schema (or its text), None for json_object, a regular expression, a list of strings, or Lark or GBNF."""
    param: str
    """The field as the caller spelt it."""
    strict: bool = False

    def grammar(self) -> str:
        """Return the grammar for the workers. Takes up to 100 ms. Raises InvalidRequest."""
        if self.kind == "json":
            return of_schema(self.value, self.param, strict=self.strict)
        if self.kind == "json_object":
            return of_json_object(self.param)
        if self.kind == "regex":
            return of_regex(self.value, self.param)
        if self.kind == "choice":
            return of_choice(self.value, self.param)
        return of_lark(self.value, self.param)


def one_output(given: dict[str, Any], strict: bool = False) -> OutputFormat:
    """Return the one of `structured_outputs` that is not None. Raises InvalidRequest for none or several."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InvalidRequest(
            f"structured_outputs has {' and '.join(named) or 'nothing'}, must have one of {', '.join(given)}",
            param="structured_outputs",
        )
    kind: Kind = named[0]  # type: ignore[assignment]
    return OutputFormat(kind, given[kind], f"structured_outputs.{kind}", strict)


class _Refused(Exception):
    """A reason and where it lies: the keys and indices that lead there."""

    def __init__(self, reason: str, *place: str | int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place


def of_schema(schema: Schema | str, param: str, *, strict: bool) -> str:
    """Return the grammar of JSON texts that follow `schema`: a JSON Schema (2020-12), or its text.

    strict: hold the schema to OpenAI's rules besides: every property is required, and no others are allowed. What comes
    out follows the schema either way. Raises InvalidRequest that names the place in the schema, below `param`.
    """
    return _placed(lambda: _grammar_of_schema(_json_text(schema), strict), param)


def schema_text(schema: Schema | str, param: str, *, strict: bool) -> str:
    """Return the schema as JSON to be put behind `%json` in a Lark grammar, checked as by `of_schema`."""
    grammar = json.loads(of_schema(schema, param, strict=strict))
    return json.dumps(grammar["grammars"][0]["json_schema"], ensure_ascii=False, separators=(",", ":"))


def of_json_object(param: str) -> str:
    """Return the grammar of any JSON object."""
    return of_schema({"type": "object"}, param, strict=False)


def of_regex(pattern: str, param: str) -> str:
    """Return the grammar of texts that the expression matches from beginning to end; the syntax of Rust's `regex`."""
    return _placed(lambda: _grammar_of_regex(pattern), param)


def of_choice(choices: list[str], param: str) -> str:
    """Return the grammar of these texts alone. Raises InvalidRequest for none, too many or too long ones."""
    return _placed(lambda: _grammar_of_choices(tuple(choices)), param)


def of_lark(text: str, param: str, *, tokenizer: LLTokenizer | None = None) -> str:
    """Return the grammar that is written in Lark as llguidance reads it, or in GBNF (`root ::= ...`).

    Schemas behind `%json` are checked as by `of_schema`. tokenizer: the served one, for grammars that may name special
    tokens; without one they are refused.
    """
    return _placed(lambda: _grammar_of_lark(text, tokenizer), param)


def _placed(work: Callable[[], str], param: str) -> str:
    """Work, and turn a refusal into an InvalidRequest that names the place."""
    try:
        grammar = work()
    except _Refused as refused:
        place = param + "".join(map(_step, refused.place))
        raise InvalidRequest(f"{place} {refused.reason}", param=place) from None
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        text = f"{param} makes a grammar of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; make it smaller"
        raise InvalidRequest(text, param=param)
    return grammar


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if re.fullmatch(r"[\w$%-]{1,64}", key) else f"[{reprlib.repr(key)}]"


def _at_most(name: str, count: int, most: int, what: str, *place: str | int) -> None:
    if count > most:
        raise _Refused(f"has {count} {what}, at most {most} are allowed ({name})", *place)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _Refused("holds half a character (a lone surrogate); send valid Unicode") from None


# Schemas


def _json_text(schema: Schema | str) -> str:
    """Return the schema as compact JSON, its keys in order."""
    try:
        if isinstance(schema, str):
            _at_most("MAX_SCHEMA_BYTES", len(schema), MAX_SCHEMA_BYTES, "bytes")
            schema = json.loads(schema)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise _Refused(f"nests too deep, at most {MAX_DEPTH} levels are allowed (MAX_DEPTH)") from None
    except ValueError as error:
        raise _Refused(f"is no JSON: {error}") from None
    _at_most("MAX_SCHEMA_BYTES", len(_utf8(text)), MAX_SCHEMA_BYTES, "bytes")
    return text


@lru_cache(NUM_CACHED)
def _grammar_of_schema(text: str, strict: bool) -> str:
    schema = _Reader(strict).read(json.loads(text))
    grammar = _compile_schema(schema)
    if error := _error_of(grammar):
        place = _locate(schema, error)
        raise _Refused(f"cannot be enforced: {error}", *place)
    return grammar


def _compile_schema(schema: Schema) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=LAYOUT)
    return grammar


class _Reader:
    """Reads one schema: checks every keyword, drops what constrains nothing, and counts."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._num_properties = self._num_alternatives = self._num_pattern_chars = 0
        self._places: set[str] = set()
        self._references: list[tuple[str, tuple[str | int, ...]]] = []

    def read(self, schema: Any) -> Schema:
        """Return what is to be enforced. Raises _Refused."""
        if isinstance(schema, dict):
            schema = {key: value for key, value in schema.items() if key != "$id"}
            if schema.get("x-guidance") == _FULL_LAYOUT:  # our own, in a schema that comes back in a Lark grammar
                del schema["x-guidance"]
        found = self._schema(schema, ())
        for reference, place in self._references:
            if not reference.startswith("#"):
                raise _Refused(
                    f"is {reprlib.repr(reference)}; only places in the schema itself (#/...) are read", *place
                )
            if reference.removeprefix("#").rstrip("/") not in self._places:
                raise _Refused(f"is {reprlib.repr(reference)}, where there is no schema", *place)
        return found

    def _schema(self, schema: Any, place: tuple[str | int, ...]) -> Schema:
        self._places.add("".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in place))
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _Refused(f"is {reprlib.repr(schema)}, must be a schema: an object, true or false", *place)
        if len(place) > 2 * MAX_DEPTH:
            raise _Refused(f"is deeper than {MAX_DEPTH} schemas in schemas (MAX_DEPTH)", *place)
        if self._strict:
            _check_strict(schema, place)
        return {key: self._keyword(key, value, (*place, key)) for key, value in schema.items() if _binds(key, value)}

    def _keyword(self, key: str, value: Any, place: tuple[str | int, ...]) -> Any:
        if key in _SCHEMA:
            return self._schema(value, place)
        if key in _SCHEMA_LISTS:
            self._count_alternatives(_listed(value, place), place)
            return [self._schema(each, (*place, index)) for index, each in enumerate(value)]
        if key in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                raise _Refused(f"is {reprlib.repr(value)}, must be an object of schemas", *place)
            self._num_properties += len(value)
            _at_most("MAX_PROPERTIES", self._num_properties, MAX_PROPERTIES, "properties by now", *place)
            if key == "patternProperties":
                for pattern in value:
                    self._pattern(pattern, (*place, pattern))
            return {name: self._schema(each, (*place, name)) for name, each in value.items()}
        if key == "enum":
            self._count_alternatives(_listed(value, place), place)
            for index, each in enumerate(value):
                _check_constant(each, (*place, index))
        elif key == "const":
            _check_constant(value, place)
        elif key in _COUNTS:
            if type(value) is not int or not 0 <= value <= MAX_COUNT:
                raise _Refused(f"is {reprlib.repr(value)}, must be a whole number from 0 to {MAX_COUNT}", *place)
        elif key in _NUMBERS:
            _check_number(value, place)
            if key == "multipleOf" and value <= 0:
                raise _Refused(f"is {value}, must be greater than 0", *place)
        elif key == "required":
            if not all(isinstance(each, str) for each in _listed(value, place, least=0)):
                raise _Refused("must be a list of names", *place)
            self._num_properties += len(value)
            _at_most("MAX_PROPERTIES", self._num_properties, MAX_PROPERTIES * 2, "properties by now", *place)
        elif key == "type":
            types = [value] if isinstance(value, str) else _listed(value, place)
            for each in types:
                if each not in TYPES:
                    raise _Refused(f"is {reprlib.repr(each)}, must be one of {', '.join(TYPES)}", *place)
            self._count_alternatives(types[1:], place)
        elif key == "pattern":
            self._pattern(value, place)
        elif key == "format":
            if value not in FORMATS:
                raise _Refused(f"is {reprlib.repr(value)}, must be one of {', '.join(FORMATS)}", *place)
        elif key == "$ref":
            if not isinstance(value, str):
                raise _Refused(f"is {reprlib.repr(value)}, must be a string", *place)
            self._references.append((value, place))
        else:
            remedy = "; a type may be a list with null in it" if key == "nullable" else ""
            raise _Refused(f"is a keyword that cannot be enforced here; leave it out{remedy}", *place)
        return value

    def _count_alternatives(self, values: list[Any], place: tuple[str | int, ...]) -> None:
        self._num_alternatives += len(values)
        _at_most("MAX_ALTERNATIVES", self._num_alternatives, MAX_ALTERNATIVES, "alternatives by now", *place)

    def _pattern(self, pattern: Any, place: tuple[str | int, ...]) -> None:
        if not isinstance(pattern, str):
            raise _Refused(f"is {reprlib.repr(pattern)}, must be a string", *place)
        self._num_pattern_chars += len(pattern)
        _at_most("MAX_REGEX_CHARS", self._num_pattern_chars, MAX_REGEX_CHARS, "characters of patterns by now", *place)
        _check_regex(pattern, place)


def _binds(key: str, value: Any) -> bool:
    """Return whether the keyword has to be enforced."""
    return key not in ANNOTATIONS and (key not in _NEUTRAL or value != _NEUTRAL[key])


def _listed(value: Any, place: tuple[str | int, ...], least: int = 1) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        raise _Refused(f"is {reprlib.repr(value)}, must be a list" + " that is not empty" * least, *place)
    return value


def _check_number(value: Any, place: tuple[str | int, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Refused(f"is {reprlib.repr(value)}, must be a number", *place)
    if abs(value) > MAX_INTEGER:
        raise _Refused(f"is {reprlib.repr(value)}, must be from -2^53 to 2^53: other numbers are not exact", *place)


def _check_constant(value: Any, place: tuple[str | int, ...], depth: int = 0) -> None:
    """Go through a const, which is a value and no schema."""
    if depth > MAX_DEPTH:
        raise _Refused(f"nests too deep, at most {MAX_DEPTH} levels are allowed (MAX_DEPTH)", *place)
    if isinstance(value, dict):
        for key, each in value.items():
            _check_constant(each, (*place, key), depth + 1)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_constant(each, (*place, index), depth + 1)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(value, place)


def _check_strict(schema: dict[str, Any], place: tuple[str | int, ...]) -> None:
    """OpenAI's rules for `strict: true`."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) and schema.get("type") != "object":
        return
    if schema.get("additionalProperties") is not False:
        raise _Refused("must have additionalProperties: false, as strict is true", *place)
    required = schema.get("required", [])
    for name in properties or ():
        if not isinstance(required, list) or name not in required:
            text = (
                f"must have {reprlib.repr(name)} in required, as strict is true; what may be absent has null as a type"
            )
            raise _Refused(text, *place)


def _locate(schema: Schema, error: str) -> tuple[str | int, ...]:
    """Return where in the schema the error comes from, as deep as the time allows.

    Every place is tried alone, with the whole schema beside it for what it refers to.
    """
    until = time.thread_time() + _LOCATE_S
    moved = _moved(schema)

    def search(node: Any, place: tuple[str | int, ...]) -> tuple[str | int, ...]:
        for step, child in _children(node):
            if time.thread_time() > until:
                break
            pointer = "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in (*place, *step))
            if _error_of(_compile_schema({"$defs": {"root": moved}, "$ref": f"#/$defs/root{pointer}"})) == error:
                return search(child, (*place, *step))
        return place

    return search(schema, ())


def _children(node: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Go through the schemas right below one, definitions first, with what leads there."""
    if not isinstance(node, dict):
        return
    for key in sorted(node, key=lambda key: key not in ("$defs", "definitions")):
        value = node[key]
        if key in _SCHEMA:
            yield (key,), value
        elif key in _SCHEMA_LISTS:
            yield from (((key, index), each) for index, each in enumerate(value))
        elif key in _SCHEMA_MAPS:
            yield from (((key, name), each) for name, each in value.items())


def _moved(node: Any) -> Any:
    """Return the schema with its references as they read from inside `$defs/root`."""
    if not isinstance(node, dict):
        return node
    moved = dict(node)
    if "$ref" in moved:
        moved["$ref"] = "#/$defs/root" + moved["$ref"].removeprefix("#")
    for key in node:
        if key in _SCHEMA:
            moved[key] = _moved(node[key])
        elif key in _SCHEMA_LISTS:
            moved[key] = [_moved(each) for each in node[key]]
        elif key in _SCHEMA_MAPS:
            moved[key] = {name: _moved(each) for name, each in node[key].items()}
    return moved


# Expressions, choices, grammars


@lru_cache(NUM_CACHED)
def _grammar_of_regex(pattern: str) -> str:
    _at_most("MAX_REGEX_CHARS", len(pattern), MAX_REGEX_CHARS, "characters")
    _check_regex(pattern, ())
    return _checked(LLMatcher.grammar_from_regex(pattern))


def _check_regex(pattern: str, place: tuple[str | int, ...]) -> None:
    """Raises _Refused for what cannot be read, or repeats too often."""
    _utf8(pattern)
    for count in re.findall(r"\{(\d*),?(\d*)\}", pattern):
        if max(int(each or 0) for each in count) > MAX_COUNT:
            raise _Refused(f"repeats {max(count, key=len)} times, at most {MAX_COUNT} are allowed (MAX_COUNT)", *place)
    if error := _error_of(LLMatcher.grammar_from_regex(pattern)):
        raise _Refused(f"cannot be enforced: {error}", *place)


@lru_cache(NUM_CACHED)
def _grammar_of_choices(choices: tuple[str, ...]) -> str:
    if not choices:
        raise _Refused("is an empty list, give at least one choice")
    _at_most("MAX_CHOICES", len(choices), MAX_CHOICES, "choices")
    _at_most("MAX_CHOICES_CHARS", sum(map(len, choices)), MAX_CHOICES_CHARS, "characters")
    for index, choice in enumerate(choices):
        if not choice:
            raise _Refused("is empty, must have at least one character", index)
    _utf8("".join(choices))
    return _checked(LLMatcher.grammar_from_regex("|".join("".join(map(_literal, choice)) for choice in choices)))


def _literal(char: str) -> str:
    """Return an expression for the character alone."""
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"


def _grammar_of_lark(text: str, tokenizer: LLTokenizer | None) -> str:
    _at_most("MAX_LARK_BYTES", len(_utf8(text)), MAX_LARK_BYTES, "bytes")
    if not is_lark_syntax(text):
        text = _lark_of_gbnf(text)
    parts, begin, num_schemas = [], 0, 0
    while found := _LARK.search(text, begin):
        parts.append(text[begin : found.start()])
        begin = found.end()
        if found["json"]:
            parts.append("%json ")
            schema, begin = _schema_at(text, begin, num_schemas)
            parts.append(schema)
            num_schemas += 1
            continue
        if found["option"]:
            raise _Refused(f"has the option {found['option']}, which is not offered; leave it out")
        if found["special"] and tokenizer is None:
            raise _Refused(f"names the special token {reprlib.repr(found['special'])}; special tokens are never text")
        parts.append(found[0])
    lark = "".join((*parts, text[begin:]))
    return _checked(json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False), tokenizer)


def _schema_at(text: str, begin: int, index: int) -> tuple[str, int]:
    """Return the schema that stands there, checked, and where it ends."""
    place = ("%json", index)
    try:
        schema, end = json.JSONDecoder().raw_decode(text, begin)
        checked = _grammar_of_schema(_json_text(schema), False)
    except (ValueError, RecursionError) as error:
        raise _Refused(f"is no JSON: {error}", *place) from None
    except _Refused as refused:
        raise _Refused(refused.reason, *place, *refused.place) from None
    return json.dumps(json.loads(checked)["grammars"][0]["json_schema"], ensure_ascii=False), end


def _lark_of_gbnf(text: str) -> str:
    try:
        lark: str = gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, text))
    except Exception as error:  # the library raises plain Exception, and IndexError at an early end
        raise _Refused(f"is neither Lark (start: ...) nor GBNF (root ::= ...): {str(error)[:MAX_ECHO_CHARS]}") from None
    return lark


_GBNF_ESCAPE = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")


def _unescaped(found: re.Match[str]) -> str:
    """Return the character itself: the library cuts the zeros of \\u0041 and then reads further digits."""
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


def _checked(grammar: str, tokenizer: LLTokenizer | None = None) -> str:
    if error := _error_of(grammar, tokenizer):
        raise _Refused(f"cannot be enforced: {error}")
    return grammar


def _error_of(grammar: str, tokenizer: LLTokenizer | None = None) -> str:
    """Compile the grammar and take the first step. Return what is wrong with it, empty = nothing."""
    matcher = LLMatcher(tokenizer or _byte_tokenizer(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return _one_line(matcher.get_error()) if matcher.is_error() else ""


def _one_line(error: str) -> str:
    """Return what llguidance says, shortened, without the place of a schema in the schema that it was given."""
    if error.startswith("NoExtension"):
        return "nothing can satisfy it"
    line = " ".join(error.split(" while processing json-schema:")[0].split())
    return line if len(line) <= MAX_ECHO_CHARS else f"{line[:MAX_ECHO_CHARS]}..."


class _Bytes:
    """A tokenizer of bytes: what a grammar allows does not depend on how its texts are cut."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


_FULL_LAYOUT: dict[str, Any] = json.loads(LLMatcher.grammar_from_json_schema("{}", overrides=LAYOUT))["grammars"][0][
    "json_schema"
].get("x-guidance")
