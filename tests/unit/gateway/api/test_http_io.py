"""Errors have the form of the API to which their endpoint belongs, and work ends with its client."""

import asyncio
import json
from typing import Any

import pytest

from gateway.api.http_io import MAX_ERROR_CHARS, error_response, is_anthropic_path, shortened, while_connected
from outrider.wire.errors import InvalidRequest, Unauthenticated


def test_a_long_error_is_cut() -> None:
    assert shortened("x" * MAX_ERROR_CHARS) == "x" * MAX_ERROR_CHARS
    assert shortened("x" * (MAX_ERROR_CHARS + 1)) == "x" * MAX_ERROR_CHARS + "..."


@pytest.mark.parametrize(
    ("path", "is_anthropic"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/messages2", False), ("/v1/chat", False)],
)
def test_an_error_has_the_form_of_its_api(path: str, is_anthropic: bool) -> None:
    assert is_anthropic_path(path) is is_anthropic
    response = error_response(InvalidRequest("n is 0", param="n"), path)
    error = json.loads(bytes(response.body))["error"]
    assert (response.status_code, error["type"], error["message"]) == (400, "invalid_request_error", "n is 0")
    assert error.get("param") == (None if is_anthropic else "n")


def test_headers_have_the_authentication_scheme_and_the_retry_time() -> None:
    assert error_response(Unauthenticated("who?"), "/v1/chat").headers["www-authenticate"] == "Bearer"
    error = InvalidRequest("later")
    assert "retry-after" not in error_response(error, "/v1/chat").headers
    for retry_after_s, told in ((0.2, "1"), (1.5, "2")):
        error.retry_after_s = retry_after_s
        assert error_response(error, "/v1/chat").headers["retry-after"] == told


async def test_work_ends_when_its_client_is_gone() -> None:
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def stays() -> Any:
        await asyncio.Event().wait()

    async def three() -> int:
        return 3

    assert await while_connected(gone, endless()) is None
    assert ended.is_set(), "it has ended when that returns"
    assert await while_connected(stays, three()) == 3
