"""Keyword arguments of a request: their names and types."""

from __future__ import annotations

import pytest

from outrider.client import (
    AsyncClient,
)


def test_unknown_parameter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"unknown parameter 'max_token'; known: .*max_tokens"):
        AsyncClient("127.0.0.1:1").stream("hello", max_token=5)  # type: ignore[call-arg]
