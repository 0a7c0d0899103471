"""The load of `outrider tune --price` and `benchmarks/`: which outputs count as complete."""

import asyncio

import httpx
import pytest

from outrider.lab.load.load import Load, RequestOutcome, send_request
from tests.unit.outrider.lab.load.completions import LOAD, USAGE, Body, piece, stream


def asked(status: int, content: str, load: Load = LOAD) -> RequestOutcome:
    async def ask_once() -> RequestOutcome:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Body(content)))
        async with httpx.AsyncClient(base_url="http://a", transport=transport) as client:
            return await send_request(client, load, 0)

    return asyncio.run(ask_once())


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_complete_output(line_end: str) -> None:
    found = asked(200, stream(piece(None), piece("stop"), USAGE, line_end=line_end))
    assert found.is_complete and found.num_tokens == 2 and 0 <= found.first_token_s <= found.total_s


@pytest.mark.parametrize(
    ("status", "content", "fault"),
    [
        (500, "out of order", "500: out of order"),
        (200, stream(piece("stop"))[:-8], "its stream ended with"),
        (200, stream(piece(None), USAGE), "finish reasons [], should be one, stop or length"),
        (200, stream(piece("stop"), piece("stop"), USAGE), "finish reasons ['stop', 'stop']"),
        (200, stream(piece(None), {"error": "lost"}), "an error in its stream: lost"),
        (200, stream(piece("stop")), "usage None, should be 2 tokens or fewer"),
        (200, "data: no\n\ndata: [DONE]\n\n", "its stream is none of completions"),
    ],
)
def test_what_is_wrong_with_an_output(status: int, content: str, fault: str) -> None:
    found = asked(status, content)
    assert not found.is_complete and fault in str(found.fault)


def test_a_refusal_is_no_fault() -> None:
    found = asked(429, "later")
    assert found.is_refused and found.fault is None and not found.is_complete
