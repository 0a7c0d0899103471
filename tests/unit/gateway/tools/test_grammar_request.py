"""Which outputs need a grammar of their own."""

import pytest

from gateway.tools.call_families import BY_PARSER
from gateway.tools.offer import offer_of
from tests.unit.gateway.tools.plans import ADD, WEATHER, planned


@pytest.mark.parametrize("parser", ["json", "hermes", "qwen3_coder"])
def test_nothing_is_bound_under_auto_without_strict_tools(parser: str) -> None:
    for parallel in (True, False):
        assert planned(offer_of([ADD], "auto", parallel), family=BY_PARSER[parser])[1] == ""
    assert planned(offer_of([WEATHER], "none", None), family=BY_PARSER[parser]) == (None, "")
