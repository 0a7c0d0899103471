"""Requests generated from /openapi.json against the whole system: it answers as the schema says and keeps nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.service.test_openapi import generated
from tests.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_system_answers_as_the_schema_says(stack: Stack) -> None:
    schema = schemathesis.openapi.from_url(f"{stack.http}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 8
    for operation in operations:

        @generated(300)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60)

        check()


def test_nothing_is_left(stack: Stack) -> None:
    give_up = time.monotonic() + 30
    while any(info.num_slots_in_use or info.num_tickets for info in (stack.target_info(), stack.draft_info())):
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert stack.metrics()["outrider_running"] == 0
