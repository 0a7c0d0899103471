"""JSON Schemas made by a seed, of every kind that a gateway enforces, and small enough for a model of any size."""

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-c]{1,4}$", "^(yes|no)$", "^[A-Z][a-z]{0,5}$", r"^\d{2}-\d{2}$", "x", "^v[0-9]+(\\.[0-9]){0,2}$")
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email", "duration")
WORDS = ("", "a", "red", "two words", 'a "quote"', "back\\slash", "a\nline", "é", "😀", "/", "null", "0")
NAMES = ("id", "name", "n", "kind", "a b", "é", 'q"', "x/y", "~", "tags", "next")
MAX_DEPTH = 3


def make_schema(seed: int) -> Schema:
    """Return a schema, the same for the same seed. Texts that follow it end soon, most of them."""
    return _Maker(random.Random(seed)).whole()


class _Maker:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.definitions: dict[str, Schema] = {}
        self.has_multiple = False
        """Only one is taken where schemas join."""

    def whole(self) -> Schema:
        for name in self.draw.sample(("part", "tree"), self.draw.randint(0, 2)):
            self.definitions[name] = self._tree() if name == "tree" else self._object(MAX_DEPTH - 1)
        made = self._object(0) if self.draw.random() < 0.8 else self._any(0)
        return made | ({"$defs": self.definitions} if self.definitions else {})

    def _tree(self) -> Schema:
        """A schema that refers to itself."""
        child = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}
        properties = {"value": self._scalar(), "next": child}
        return {"type": "object", "properties": properties, "required": ["next"], "additionalProperties": False}

    def _any(self, depth: int) -> Schema:
        makers = [self._scalar]
        if depth < MAX_DEPTH:
            makers += [lambda: self._object(depth), lambda: self._array(depth), lambda: self._alternatives(depth)]
            makers += [self._reference] if self.definitions else []
        return self.draw.choice(makers)()

    def _object(self, depth: int) -> Schema:
        names = self.draw.sample(NAMES, self.draw.randint(0, 4))
        required = [name for name in names if self.draw.random() < 0.7]
        made: Schema = {"type": "object", "properties": {name: self._any(depth + 1) for name in names}}
        made["required"] = required
        others = self.draw.choice((False, False, False, False, self._scalar(), None))
        if others is not None:
            made["additionalProperties"] = others
        if not names:
            made |= {"additionalProperties": self._scalar(), "minProperties": 1, "maxProperties": 2}
        elif self.draw.random() < 0.1:
            made |= {"patternProperties": {"^x-": {"type": "boolean"}}}
        elif not required and others is False and self.draw.random() < 0.3:
            made["minProperties"] = 1
        return made

    def _array(self, depth: int) -> Schema:
        low = self.draw.randint(0, 2)
        made: Schema = {"type": "array", "items": self._any(depth + 1), "minItems": low}
        made["maxItems"] = low + self.draw.randint(0, 2)
        if self.draw.random() < 0.2:
            made["prefixItems"] = [self._scalar() for _ in range(self.draw.randint(1, 2))]
            made["items"] = self.draw.choice([False, self._scalar()])
            made["minItems"] = made["maxItems"] = len(made["prefixItems"])
        return made

    def _alternatives(self, depth: int) -> Schema:
        kind = self.draw.randint(0, 2)
        if kind == 0:
            return {"anyOf": [self._any(depth + 1) for _ in range(self.draw.randint(2, 3))]}
        if kind == 1:
            return {"oneOf": [{"type": "boolean"}, self._string(), {"type": "null"}]}
        low = self.draw.randint(-5, 5)
        return {"type": "integer", "allOf": [{"minimum": low}, {"maximum": low + self.draw.randint(0, 40)}]}

    def _reference(self) -> Schema:
        return {"$ref": f"#/$defs/{self.draw.choice(sorted(self.definitions))}"}

    def _scalar(self) -> Schema:
        makers = (self._string, self._integer, self._number, self._enum, self._constant, self._types)
        return self.draw.choice(makers)()

    def _string(self) -> Schema:
        made: Schema = {"type": "string"}
        kind = self.draw.randint(0, 3)
        if kind == 0:
            made["pattern"] = self.draw.choice(PATTERNS)
            made["maxLength"] = 12
        elif kind == 1:
            made["format"] = self.draw.choice(FORMATS)
        else:
            made["minLength"] = self.draw.randint(0, 3)
            made["maxLength"] = made["minLength"] + self.draw.randint(0, 6)
        return made

    def _integer(self) -> Schema:
        low = self.draw.choice((-1000, -7, 0, 1, 12))
        made: Schema = {"type": "integer", self.draw.choice(("minimum", "exclusiveMinimum")): low}
        width = self.draw.choice((2, 9, 123456))
        made[self.draw.choice(("maximum", "exclusiveMaximum"))] = low + width
        if not self.has_multiple and width > 2 and self.draw.random() < 0.2:
            self.has_multiple = True
            made["multipleOf"] = 2
        return made

    def _number(self) -> Schema:
        low = self.draw.choice((-2.5, 0, 0.25))
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + self.draw.choice((0.7, 3.1, 100))}

    def _enum(self) -> Schema:
        values: list[Any] = [*self.draw.sample(WORDS, self.draw.randint(1, 4))]
        return {"enum": values + self.draw.choice([[], [None], [1, 2.5], [True], [[1, "a"]], [{"k": [None]}]])}

    def _constant(self) -> Schema:
        return {"const": self.draw.choice([*WORDS, 7, -0.5, None, False, [], {"a": 1}])}

    def _types(self) -> Schema:
        return {"type": self.draw.sample(("null", "boolean", "string"), 2), "maxLength": 5}
