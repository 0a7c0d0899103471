"""What cannot be served is refused by name over HTTP and gRPC, and leaves nothing in the workers.

Proposals that break a rule: test_draft_failure.py. Pairs and folders that cannot work: test_incompatible_pair.py.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.stack import Stack, wait_until_nothing_is_held

MAX_BODY = 4 << 20


@pytest.fixture(autouse=True)
def _leaves_nothing(stack: Stack) -> Iterator[None]:
    """Every test of this file: no slot, block or ticket is held, and the next request is served."""
    yield
    wait_until_nothing_is_held(stack)
    metrics = stack.metrics()
    assert metrics["outrider_running"] == metrics["outrider_queue_depth"] == 0


def post(stack: Stack, path: str = "/v1/completions", **how: Any) -> httpx.Response:
    return httpx.post(f"{stack.http}{path}", timeout=60, **how)


def refusal(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_http_names_the_field_and_the_value(stack: Stack, stream: bool) -> None:
    """The same before a stream: a status, no event. Every field of every body: service/test_routes.py."""
    error = refusal(post(stack, json={"prompt": [5] * 2100, "max_tokens": 100, "stream": stream}))
    assert (error["type"], error["param"]) == ("invalid_request_error", "prompt")
    assert all(number in error["message"] for number in ("2100", "2048")), error["message"]


def test_a_body_over_the_limit_is_413_before_it_is_read(stack: Stack) -> None:
    error = refusal(post(stack, json={"prompt": "x" * MAX_BODY}), 413)
    assert str(MAX_BODY) in error["message"]
    url = urlsplit(stack.http)
    with socket.create_connection((url.hostname, url.port), timeout=20) as raw:
        head = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n"
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head)
        assert b" 413 " in raw.recv(4096)
