"""Calls in OpenAI's chunks."""

from gateway.api.openai_responses import delta_of
from gateway.tools.call_families import HERMES
from gateway.tools.reader import CallReader

NAMES = frozenset({"weather", "add-2"})


def test_arguments_come_while_they_are_written_and_the_name_first() -> None:
    reader = CallReader(HERMES, NAMES, None, False, None)
    deltas = [
        delta_of(reader.push(piece), lambda index, name: "call_1")
        for piece in ["Well.\n<tool", '_call>\n{"name": "weather", "argu', 'ments": {"ci', 'ty": "Paris"', "}}\n</to"]
    ]
    function = {"name": "weather", "arguments": '{"ci'}
    assert deltas == [
        {"content": "Well."},
        {},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Paris"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]
    assert delta_of(reader.push("ol_call>") + reader.finish(False), lambda index, name: "") == {}
