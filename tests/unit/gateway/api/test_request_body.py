"""Bodies that would hold the event loop are refused before they are read."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api import request_body
from gateway.api.request_body import LARGE_BYTES, MAX_OBJECTS, MAX_VALUES, check_values, max_values
from outrider.wire.errors import RequestTooLarge


def tool(index: int) -> dict[str, Any]:
    field = {"type": "string", "description": "one, [of] {many}: \\", "enum": ["a", "b"]}
    names = {f"field_{number}": field for number in range(60)}
    parameters = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    function = {"name": f"tool_{index}", "description": 'a "tool", one', "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


PASSING: dict[str, Any] = {
    "tools of an agent": {"tools": [tool(index) for index in range(250)]},
    "a context of ids": {"prompt": [123_456] * 200_000},
    "marks in a text": {"prompt": "a, b: [c] {d} " * 200_000},
    "escapes": {"prompt": '\\"[' * 200_000},
}


@pytest.mark.parametrize("name", PASSING)
async def test_what_clients_send_passes(name: str) -> None:
    await check_values(json.dumps(PASSING[name]).encode(), MAX_VALUES)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"prompt":[' + b"1," * 1000 + b"1]}", "more than 1000 values"),
        (b'{"prompt":["' + b'a\\"","' * 1000 + b'a"]}', "more than 1000 values"),
        (b"[" * (MAX_OBJECTS + 1), f"more than {MAX_OBJECTS} lists, objects and fields"),
    ],
)
async def test_the_refusal_names_the_limit(body: bytes, shown: str) -> None:
    with pytest.raises(RequestTooLarge, match=shown):
        await check_values(body, 1000)


@pytest.mark.parametrize("text", ['"', "\\", '\\"', "é\\\\,", '"['])
async def test_a_text_is_read_alike_wherever_it_is_cut(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps([text * 9, 1, [2, text]]).encode()
    for size in range(1, len(body)):
        monkeypatch.setattr(request_body, "LARGE_BYTES", size)
        await check_values(body, 4)
        with pytest.raises(RequestTooLarge):
            await check_values(body, 3)


def test_a_prompt_of_ids_fills_the_longest_context() -> None:
    models = [SimpleNamespace(context_limit=limit) for limit in (2_048, 1_000_000)]
    assert max_values(cast(Any, models)) > 1_000_000 + MAX_VALUES > LARGE_BYTES
