"""Checks and simplifies a caller's JSON Schema, before `gateway.grammars` compiles it.

A keyword that llguidance would ignore or get wrong is refused with its path, if it constrains the output. A keyword
that, by the standard, constrains nothing is dropped.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any
from urllib.parse import quote, unquote

from gateway.json_schema_parts import (
    LISTS,
    MAPS,
    MAX_DEPTH,
    SINGLE,
    PatternRefused,
    Schema,
    SchemaPath,
    SchemaRefused,
    pointer,
)

MARGIN = 1e-15
"""Distance from an exclusive bound at which numbers other than integers are allowed, as a share of the bound, or
absolute for a bound of 0. With a much smaller distance below 0.7, 0.69999999999999999 would be allowed, which a reader
rounds to 0.7."""
MAX_INTEGER = 2**53
"""Largest absolute value up to which all integers are exact in every reader of JSON, also one that reads floats."""

FORMATS: tuple[str, ...] = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
INTEGER_FORMATS = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (None, None),
    "uint": (0, None),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, None),
}
"""(Lower bound, upper bound) of an integer, by the value of `format`. None: no bound is enforced, as there is none or
it is beyond 2^53. Other values of `format` do not limit integers."""
NOT_ENFORCED = frozenset(
    {"uniqueItems", "nullable", "not", "if", "then", "else", "contains", "minContains", "maxContains"}
    | {"propertyNames", "unevaluatedItems", "unevaluatedProperties", "additionalItems", "dependencies"}
    | {"dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef", "$id"}
    | {"disallow", "divisibleBy", "extends"}
)
"""Keywords with which a schema is refused: they limit the output, or change the meaning of other keywords, and cannot
be enforced. The last three are of JSON Schema draft 3."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Values with which these keywords constrain nothing and are dropped. With other values they are refused."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_KEYWORDS = frozenset(
    {*SINGLE, *LISTS, *MAPS, *_COUNTS, *_NUMBERS} | {"enum", "const", "required", "type", "pattern", "format", "$ref"}
)
"""Keywords that are enforced."""
_JOINED_LISTS = ("anyOf", "oneOf", "allOf")
_JOINED = frozenset({"anyOf", "oneOf", "$ref"})
_HARMLESS = frozenset({"type", "enum", "const", "required", "$defs", "definitions"})
"""Keywords that do not make enforcement harder if schemas are joined, such as by `allOf`."""
_LOOKS = re.compile(r"\\[1-9k]|\(\?<?[=!]|\(\?P=|(?P<passed>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?)", re.DOTALL)
"""Look-around and backreferences, and what is skipped: other escapes, and classes of characters, to the end of the
pattern if one does not close."""


def read_schema(schema: Any, *, strict: bool = False) -> Schema:
    """Return a JSON Schema with only the keywords that limit the output. Raises SchemaRefused if a keyword cannot be
    enforced.

    strict: whether the schema must also follow OpenAI's rules for `strict: true`.
    """
    if isinstance(schema, dict) and isinstance(schema.get("$id"), str):
        schema = dict(schema)
        del schema["$id"]
    return _Reader(strict).read(schema)


class _Reader:
    """A reader of one schema. It checks every keyword, drops what constrains nothing, and then checks the whole."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._schemas: dict[str, tuple[SchemaPath, dict[str, Any]]] = {}
        """Schemas with their paths, by pointer; true and false are absent."""
        self._pointers: set[str] = set()
        self._is_joined = False
        """Whether schemas are joined anywhere, so that the constraints of one may meet those of another."""
        self._checked: set[str] = set()
        """Pointers of schemas from which no references lead back."""

    def read(self, schema: Any) -> Schema:
        enforced = self._schema(schema, ())
        self._check_targets()
        self._check_multiples()
        self._check_counted()
        for name in self._schemas:
            self._check_references(name, frozenset())
        self._relax()
        return enforced

    def _check_targets(self) -> None:
        for path, schema in self._schemas.values():
            if "$ref" in schema and self._target(schema) not in self._pointers:
                where = "only places in the schema itself (#/...) are read"
                if schema["$ref"].startswith("#"):
                    where = "there is no schema there"
                raise SchemaRefused(f"is {reprlib.repr(schema['$ref'])}; {where}", *path, "$ref")

    def _relax(self) -> None:
        """Turns a oneOf whose members are distinguished by a constant property into the same anyOf.

        llguidance follows no references in oneOf.

        # {"oneOf": [{... "kind": {"const": "a"}}, {... "kind": {"const": "b"}}]}: no value is valid under both
        """
        for _, schema in self._schemas.values():
            if "/oneOf/" in str(schema.get("$ref")):
                return
        for _, schema in self._schemas.values():
            if "oneOf" in schema and "anyOf" not in schema and self._are_distinct(schema["oneOf"]):
                items = list(schema.items())  # in their order, which outputs follow
                schema.clear()
                for key, value in items:
                    if key == "oneOf":
                        key = "anyOf"
                    schema[key] = value

    def _are_distinct(self, members: list[Schema]) -> bool:
        constants: list[dict[str, Any]] = []  # of each member
        for member in members:
            if isinstance(member, dict) and member.keys() == {"$ref"}:
                _, member = self._schemas.get(self._target(member), ((), {}))
            if not isinstance(member, dict) or member.get("type") != "object":
                return False
            constants.append(_required_constants(member))
        for name in constants[0]:
            values = [of_member.get(name) for of_member in constants]
            if all(isinstance(value, str) for value in values) and len(set(values)) == len(values):
                return True
        return False

    def _target(self, schema: dict[str, Any]) -> str:
        reference: str = schema["$ref"]
        if not reference.startswith("#"):
            return reference
        return quote(unquote(reference.removeprefix("#").rstrip("/")))

    def _schema(self, schema: Any, path: SchemaPath) -> Schema:
        self._pointers.add(pointer(path))
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaRefused(f"is {reprlib.repr(schema)}, must be a schema: an object, true or false", *path)
        if len(path) > 2 * MAX_DEPTH:
            raise SchemaRefused(f"is deeper than {MAX_DEPTH} schemas in schemas (MAX_DEPTH)", *path)
        if self._strict:
            _check_strict(schema, path)
        enforced: dict[str, Any] = {}
        self._schemas[pointer(path)] = (path, enforced)
        for key, value in schema.items():
            if key in _KEYWORDS:
                enforced[key] = self._keyword(key, value, (*path, key))
            elif key in NOT_ENFORCED and not _is_neutral(key, value):
                remedy = ""
                if key == "nullable":
                    remedy = ", and give a type as a list with null in it"
                raise SchemaRefused(f"is a keyword that cannot be enforced here; leave it out{remedy}", *path, key)
            else:
                _check_depth(value, (*path, key))
        _read_format(enforced)
        _move_bounds(enforced)
        num_joined = len(enforced.get("allOf", ())) + len(_JOINED & enforced.keys())
        has_own = bool(enforced.keys() - _JOINED - _HARMLESS - {"allOf"})
        self._is_joined |= num_joined + has_own > 1
        return enforced

    def _keyword(self, key: str, value: Any, path: SchemaPath) -> Any:
        if key in SINGLE:
            return self._schema(value, path)
        if key == "anyOf":
            return self._any_of(_listed(value, path), path)
        if key in LISTS:
            members = _listed(value, path)
            return [self._schema(member, (*path, index)) for index, member in enumerate(members)]
        if key in MAPS:
            return self._map(key, value, path)
        if key == "enum":
            for index, constant in enumerate(_listed(value, path)):
                self._constant(constant, (*path, index))
        elif key == "const":
            self._constant(value, path)
        elif key in _COUNTS:
            if type(value) is not int or not 0 <= value <= MAX_INTEGER:
                raise SchemaRefused(f"is {reprlib.repr(value)}, must be a whole number from 0 to 2^53", *path)
        elif key in _NUMBERS:
            value = _within_exact(key, value)
            _check_number(value, path)
            if key == "multipleOf" and value <= 0:
                raise SchemaRefused(f"is {value}, must be greater than 0", *path)
        elif key == "required":
            for name in _listed(value, path, min_len=0):
                if not isinstance(name, str):
                    raise SchemaRefused("must be a list of names", *path)
        elif key == "type":
            types = [value]
            if not isinstance(value, str):
                types = _listed(value, path)
            for name in types:
                if name not in TYPES:
                    raise SchemaRefused(f"is {reprlib.repr(name)}, must be one of {', '.join(TYPES)}", *path)
        elif key == "pattern":
            _check_pattern(value, path)
        elif not isinstance(value, str):  # of format and $ref
            raise SchemaRefused(f"is {reprlib.repr(value)}, must be a string", *path)
        return value

    def _any_of(self, members: list[Any], path: SchemaPath) -> list[Schema]:
        """A member whose pattern cannot be enforced is dropped if another member than null remains.

        An output that follows the remaining members follows the schema.
        """
        enforced: list[Schema] = []
        refused: PatternRefused | None = None
        for index, member in enumerate(members):
            try:
                enforced.append(self._schema(member, (*path, index)))
            except PatternRefused as error:
                refused = refused or error
                enforced.append(False)  # so that references find the others where they stood
        if refused is not None and all(member is False or member == {"type": "null"} for member in enforced):
            raise refused
        return enforced

    def _map(self, key: str, value: Any, path: SchemaPath) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise SchemaRefused(f"is {reprlib.repr(value)}, must be an object of schemas", *path)
        if key == "patternProperties":
            for pattern in value:
                _check_pattern(pattern, (*path, pattern))
        return {name: self._schema(schema, (*path, name)) for name, schema in value.items()}

    def _constant(self, value: Any, path: SchemaPath, depth: int = 0) -> None:
        if depth > MAX_DEPTH:
            raise SchemaRefused(f"nests deeper than {MAX_DEPTH} levels (MAX_DEPTH)", *path)
        if isinstance(value, dict):
            for key, child in value.items():
                self._constant(child, (*path, key), depth + 1)
        elif isinstance(value, list):
            for index, child in enumerate(value):
                self._constant(child, (*path, index), depth + 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(value, path)

    def _check_multiples(self) -> None:
        # Several multipleOf are refused where they may meet: llguidance multiplies them in 32 bits.
        multiples = [(*path, "multipleOf") for path, schema in self._schemas.values() if "multipleOf" in schema]
        if self._is_joined and len(multiples) > 1:
            raise SchemaRefused("cannot be enforced beside another multipleOf where schemas are joined", *multiples[-1])

    def _check_counted(self) -> None:
        # Some counts cannot be enforced by llguidance: an unnamed property may repeat the name of an earlier one.
        for path, schema in self._schemas.values():
            if schema.get("minProperties", 0) > len(set(schema.get("required", ()))) + 1:
                text = "cannot be enforced for more properties than are required and one: the same name may come again"
                raise SchemaRefused(text, *path, "minProperties")

    def _check_references(self, name: str, above: frozenset[str]) -> None:
        if name in self._checked or name not in self._schemas:
            return
        path, schema = self._schemas[name]
        if name in above:
            raise SchemaRefused("comes back to itself by references alone", *path)
        if len(above) > MAX_DEPTH:
            raise SchemaRefused(
                f"has more than {MAX_DEPTH} schemas above it that it holds together with (MAX_DEPTH)", *path
            )
        joined: list[str] = []
        for key in _JOINED_LISTS:
            for index in range(len(schema.get(key, ()))):
                joined.append(f"{name}/{key}/{index}")
        if "$ref" in schema:
            joined.append(self._target(schema))
        for other in joined:
            self._check_references(other, above | {name})
        self._checked.add(name)


def _required_constants(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    constants: dict[str, Any] = {}
    for name in schema.get("required", ()):
        child = properties.get(name)
        if isinstance(child, dict) and "const" in child:
            constants[name] = child["const"]
    return constants


def _move_bounds(schema: dict[str, Any]) -> None:
    """Exclusive bounds become inclusive ones, because llguidance 1.9 gets them wrong.

    It allows 2 above an exclusive 2 and up to 2.5, and compares texts where readers compare floats.
    """
    if schema.get("type") == "integer":
        return
    for key, other, sign, inner in (("exclusiveMinimum", "minimum", 1, max), ("exclusiveMaximum", "maximum", -1, min)):
        if key in schema:
            edge = schema.pop(key)
            inside = edge + sign * (abs(edge) or 1) * MARGIN
            schema[other] = inner(inside, schema.get(other, inside))


def _read_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if name is None or name in FORMATS:
        return
    del schema["format"]
    types = schema.get("type")
    if name not in INTEGER_FORMATS or (types != "integer" and types not in (["integer", "null"], ["null", "integer"])):
        return
    if "enum" in schema or "const" in schema:
        return
    low, high = INTEGER_FORMATS[name]
    if low is not None and "minimum" not in schema and "exclusiveMinimum" not in schema:
        schema["minimum"] = low
    if high is not None and "maximum" not in schema and "exclusiveMaximum" not in schema:
        schema["maximum"] = high


def _is_neutral(key: str, value: Any) -> bool:
    return any(type(value) is type(each) and value == each for each in _NEUTRAL.get(key, ()))


def _within_exact(key: str, value: Any) -> Any:
    # A bound beyond 2^53 becomes the nearest exact one: values within that are within both.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if key in ("maximum", "exclusiveMaximum"):
        return min(value, MAX_INTEGER)
    if key in ("minimum", "exclusiveMinimum"):
        return max(value, -MAX_INTEGER)
    return value


def _check_pattern(pattern: Any, path: SchemaPath) -> None:
    if not isinstance(pattern, str):
        raise SchemaRefused(f"is {reprlib.repr(pattern)}, must be a string", *path)
    if any(found["passed"] is None for found in _LOOKS.finditer(pattern)):
        raise PatternRefused(
            f"is {reprlib.repr(pattern)}, and look-around and backreferences cannot be enforced; leave the pattern "
            "out, or write one without them",
            *path,
        )


def _listed(value: Any, path: SchemaPath, min_len: int = 1) -> list[Any]:
    if not isinstance(value, list) or len(value) < min_len:
        what = "a list"
        if min_len:
            what = "a list that is not empty"
        raise SchemaRefused(f"is {reprlib.repr(value)}, must be {what}", *path)
    return value


def _check_depth(value: Any, path: SchemaPath, depth: int = 0) -> None:
    # Responses echo a schema as it came, and orjson writes 254 levels.
    if depth > MAX_DEPTH:
        raise SchemaRefused(f"nests deeper than {MAX_DEPTH} levels (MAX_DEPTH)", *path)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            _check_depth(child, path, depth + 1)


def _check_number(value: Any, path: SchemaPath) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SchemaRefused(f"is {reprlib.repr(value)}, must be a number", *path)
    if not abs(value) <= MAX_INTEGER:
        raise SchemaRefused(f"is {reprlib.repr(value)}, must be from -2^53 to 2^53: other numbers are not exact", *path)


def _check_strict(schema: dict[str, Any], path: SchemaPath) -> None:
    properties = schema.get("properties")
    if not isinstance(properties, dict) and schema.get("type") != "object":
        return
    if schema.get("additionalProperties") is not False:
        raise SchemaRefused("must have additionalProperties: false, as strict is true", *path)
    required = schema.get("required", [])
    if not isinstance(properties, dict):
        return
    for name in properties:
        if not isinstance(required, list) or name not in required:
            text = (
                f"must have {reprlib.repr(name)} in required, as strict is true; what may be absent has null as a type"
            )
            raise SchemaRefused(text, *path)
