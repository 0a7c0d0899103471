"""Errors of a body name the parameter as its caller writes it, and quote no more than they must."""

from typing import Any

import pytest

from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from outrider.wire.errors import InvalidRequest

HELLO = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("body", "shown", "param"),
    [
        ([], "the body is a JSON list, must be an object", None),
        ({}, "messages is required", "messages"),
        ({"messages": []}, r"messages has 0 items, at least 1 is needed", "messages"),
        ({"messages": [HELLO], "bad_words": ["x"] * 4000}, "bad_words has 4000 items, at most [0-9]+ are", "bad_words"),
        ({"messages": [HELLO], "more": 1}, "unknown parameter more; leave it out", "more"),
        ({"messages": [HELLO, {"role": 5}]}, r"messages\[1\]\.role is 5: ", "messages[1].role"),
        ({"messages": [HELLO], "speculation": True}, 'is True: must be an object, such as {"enabled"', "speculation"),
        ({"messages": [HELLO], "max_tokens": "9" * 100_000}, "max_tokens is '9+[.]+9+': ", "max_tokens"),
    ],
)
def test_the_first_error_of_a_body(body: Any, shown: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match=shown) as caught:
        parse_body(ChatBody, body)
    assert caught.value.param == param
    assert len(caught.value.message) < 300
