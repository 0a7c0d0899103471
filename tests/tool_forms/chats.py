"""Answers with calls that every template is asked to write, and the tools that they call."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tools.call_families import CallFamily, CallIds
from gateway.tools.offer import Tool

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "Note the weather, please."}
RESULT = "noted-4711"
"""Content of each tool's answer."""
FIELDS: Mapping[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "rate": {"type": "number"},
    "is_set": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"type": "object", "properties": {"at": {"type": "object"}}},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}


def _schema(*names: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    properties = {name: FIELDS[name] for name in names}
    return {"type": "object", "properties": properties, "required": list(required)}


TOOLS = (
    Tool("note_weather", "Notes the weather.", _schema(*FIELDS)),
    Tool("wait", "Waits for so many days.", _schema("days", required=("days",))),
)
STRICT_TOOL = Tool(
    "wait", "Waits for so many days.", {**_schema("days", required=("days",)), "additionalProperties": False}, True
)
STRICT_ANSWER = "one call"
"""Name of the answer that calls STRICT_TOOL alone."""


@dataclass(frozen=True)
class Call:
    """A call of one of TOOLS."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An assistant's message."""

    calls: tuple[Call, ...]
    content: str = ""
    has_tag: bool = False
    """Whether a value has a text in it that looks like a tag of calls."""

    def message(self, family: CallFamily) -> Message:
        """Return the message as a client sends it back, with ids that Outrider gives."""
        calls = []
        for index, call in enumerate(self.calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            calls.append({"id": call_id(family, call.name, index), "type": "function", "function": function})
        return {"role": "assistant", "content": self.content, "tool_calls": calls}

    def results(self, family: CallFamily) -> list[Message]:
        """Return the tools' answers."""
        results = []
        for index, call in enumerate(self.calls):
            place = {"tool_call_id": call_id(family, call.name, index), "name": call.name}
            results.append({"role": "tool", "content": RESULT, **place})
        return results


def call_id(family: CallFamily, name: str, index: int) -> str:
    """Return an id of the form that the family's templates take."""
    if family.ids is CallIds.NUMBERED:
        return f"functions.{name}:{index}"
    if family.ids is CallIds.SHORT:
        return f"abcdefgh{index}"
    return f"call_{index}"


def _note(**arguments: Any) -> Call:
    return Call("note_weather", arguments)


WAIT = Call("wait", {"days": 2})
WRONG = Answer((Call("wait", {"days": "many"}),))
"""A call that the schema of STRICT_TOOL does not allow."""
ANSWERS: Mapping[str, Answer] = {
    "one call": Answer((WAIT,)),
    "two calls": Answer((_note(city="Paris"), WAIT)),
    "text before": Answer((_note(city="Rome"),), "I note it."),
    "no arguments": Answer((_note(),)),
    "each type": Answer(
        (_note(city="3", days=-3, rate=0.5, is_set=True, tags=["a", "b c"], where={"at": {}}, note=None),)
    ),
    "letters": Answer((_note(city="Zürich 東京 🌧", tags=["ß", "é"]),)),
    "quotes": Answer((_note(city='it\'s "so", he said', tags=['"', "'"]),)),
    "lines": Answer((_note(city="one\ntwo\n\n three", note="C:\\new\ttab"),)),
    "tags": Answer((_note(city="<b>x</b> <tool_call> [TOOL_CALLS] </x> {} ]"),), has_tag=True),
    "nested": Answer((_note(where={"at": {"x": [1, {"y": "z"}], "is_far": False}}),)),
}
