"""The tools of a request and the choice among them are checked before anything is done with them."""

from typing import Any

import pytest

from gateway.tools.offer import NO_TOOLS, Tool, check_size, offer_of
from outrider.wire.errors import InvalidRequest

F, G = Tool("f"), Tool("g")


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, ("auto", None, [0, 1])),
        ("auto", False, ("auto", 1, [0, 1])),
        ("required", True, ("required", None, [0, 1])),
        (("g",), True, ("required", 1, [1])),
    ],
)
def test_a_choice_says_which_tools_may_be_called_and_how_often(
    choice: Any, parallel: bool | None, expected: Any
) -> None:
    offer = offer_of([F, G], choice, parallel)
    assert (offer.choice, offer.max_calls, [index for index, _ in offer.callable_tools]) == expected


def test_no_tools_are_offered_where_none_may_be_called() -> None:
    assert offer_of([F], "none", None) is offer_of([], None, True) is offer_of([], "auto", None) is NO_TOOLS


@pytest.mark.parametrize(
    ("tools", "choice", "shown", "param"),
    [
        ([], "required", "tool_choice is 'required', and there are no tools", "tool_choice"),
        ([], ("f",), "tool_choice names the tool 'f', and there are no tools", "tool_choice"),
        ([F, G], ("h",), "tool_choice names 'h', which is none of the tools: 'f', 'g'$", "tool_choice"),
        ([F, Tool("a b")], None, r"\.name is 'a b', must be 1 to 128 letters", "tools[1].function.name"),
        ([Tool("x" * 129)], "none", "must be 1 to 128 letters", "tools[0].function.name"),
        ([F, G, F], None, r"is 'f', as that of tools\[0\].function; name", "tools[2].function.name"),
        ([Tool("f", parameters={"type": "array"})], None, "'array', must describe an", "tools[0].function.parameters"),
        ([Tool("f", "\ud800")], None, "tools cannot be written as JSON", "tools"),
    ],
)
def test_what_cannot_be_called_is_refused_by_its_place(tools: list[Tool], choice: Any, shown: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=shown) as caught:
        offer_of(tools, choice, None)
    assert caught.value.param == param


def test_tools_are_bounded_in_number_and_bytes() -> None:
    offer = offer_of([F, G], None, None)
    # 90 bytes: {"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}
    assert offer.num_bytes == 2 * 90 + len("[[,]]")
    check_size(offer, 2, offer.num_bytes)
    with pytest.raises(InvalidRequest, match="tools has 2 tools, at most 1 are allowed"):
        check_size(offer, 1, offer.num_bytes)
    with pytest.raises(InvalidRequest, match=f"tools has {offer.num_bytes} bytes, at most 100 are allowed"):
        check_size(offer, 2, 100)
