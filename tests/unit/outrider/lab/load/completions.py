"""Streams of completions, as a gateway sends them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from outrider.lab.load.load import Load

LOAD = Load("http://a", ("one", "two"), max_tokens=2, ignore_eos=False)


USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


class Body(httpx.AsyncByteStream):
    def __init__(self, text: str) -> None:
        self.text = text

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.text.encode()


def piece(reason: str | None) -> dict[str, Any]:
    return {"choices": [{"finish_reason": reason}]}


def stream(*events: dict[str, Any], line_end: str = "\n") -> str:
    told = [*map(json.dumps, events), "[DONE]"]
    return "".join(f"data: {event}{2 * line_end}" for event in told)
