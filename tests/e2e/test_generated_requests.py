"""Requests generated from /openapi.json against the whole system: it answers as the schema says and keeps nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.service.test_openapi import generated
from tests.stack import Stack, gateway_beside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_system_answers_as_the_schema_says(stack: Stack) -> None:
    """Many a request asks for more than there is time for: 504 then."""
    with gateway_beside(stack, "--request-timeout-s", "5") as gateway:
        check_all(f"http://{gateway.ready['http']}")


def check_all(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 8, operations
    for operation in operations:

        @generated(150)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            response = case.call(timeout=60)
            assert response.status_code in (*range(200, 500), 504), response.text
            case.validate_response(response, excluded_checks=[positive_data_acceptance, not_a_server_error])

        check()


def test_nothing_is_left(stack: Stack) -> None:
    give_up = time.monotonic() + 30
    while any(info.num_slots_in_use or info.num_tickets for info in (stack.target_info(), stack.draft_info())):
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert stack.metrics()["outrider_running"] == 0
