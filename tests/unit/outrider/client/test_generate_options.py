"""Keyword arguments of a request: their names and types."""

from fractions import Fraction

import numpy as np
import pytest

from outrider.client import AsyncClient
from outrider.client.generate_options import check_types
from outrider.wire.errors import InvalidRequest


def test_unknown_parameter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"unknown parameter 'max_token'; known: .*max_tokens"):
        AsyncClient("127.0.0.1:1").stream("hello", max_token=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 1.0}, "max_tokens is 1.0, must be a whole number"),
        ({"n": True}, "n is True, must be a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot', must be a number"),
        ({"top_p": False}, "top_p is False, must be a number"),
        ({"timeout_s": 0}, "timeout_s is 0, must be greater than 0, or None"),
        ({"timeout_s": float("nan")}, "timeout_s is nan, must be greater than 0, or None"),
    ],
)
def test_a_value_of_another_type_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_types(given, given)
    assert refused.value.message == message and [refused.value.param] == list(given)


def test_numbers_of_other_libraries_are_numbers() -> None:
    given = {"max_tokens": np.int64(5), "temperature": np.float32(0.5), "top_p": Fraction(1, 2)}
    check_types([*given, "seed"], given)
