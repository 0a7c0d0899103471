"""Fields that are ignored."""

import logging

import pytest

from gateway.api.schemas import base as base_schemas
from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from tests.unit.gateway.api.schemas.prompts_of import said


def test_what_is_ignored_is_named_once_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_schemas, "_named", set())
    caplog.set_level(logging.INFO)
    for number in range(2 * base_schemas.MAX_NAMED):
        parse_body(ChatBody, {"messages": [said(odd=1), said(**{f"n{number // 2}" * 100: 1})]})
    assert caplog.text.count("'odd' of a message") == 1
    assert len(caplog.records) == base_schemas.MAX_NAMED and all(len(each.message) < 200 for each in caplog.records)
