"""A growing text is read alike however it comes, and waits no longer than its bounds."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.tools.cursor import MAX_SPACE, Cursor, NotACall, Parsing, overlap, words_of


def outcome(text: str, read: Callable[[Cursor], Parsing[Any]], size: int) -> tuple[Any, int]:
    """Return what `read` makes of a text that comes in pieces of so many characters, and where the cursor then is."""
    cursor = Cursor()
    steps = read(cursor)
    try:
        for at in range(0, len(text), size):
            cursor.append(text[at : at + size])
            assert next(steps) is None
        cursor.is_final = True
        while True:
            next(steps)
    except StopIteration as stop:
        return stop.value, cursor.position


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("text", "read", "expected"),
    [
        ("</a> \n<b>x", lambda cursor: cursor.follows("\n</a>\n<b>"), (True, 9)),
        ("</a> <c>", lambda cursor: cursor.follows("</a><b>"), (False, 0)),
        ("</a>", lambda cursor: cursor.follows("</a><b>"), (False, 0)),
        ("name: x}", lambda cursor: cursor.until(["}", ":"]), (("name", ":"), 5)),
        (" \t\nx", lambda cursor: cursor.skip_space(), (None, 3)),
        (" " * (MAX_SPACE + 9) + "x", lambda cursor: cursor.skip_space(), (None, MAX_SPACE)),
    ],
)
def test_reading_does_not_depend_on_the_pieces(
    text: str, read: Callable[[Cursor], Parsing[Any]], expected: tuple[Any, int], size: int
) -> None:
    assert outcome(text, read, size) == expected


@pytest.mark.parametrize("size", [1, 100])
def test_an_end_that_comes_too_late_or_never_is_no_call(size: int) -> None:
    with pytest.raises(NotACall):
        outcome("abc:", lambda cursor: cursor.until([":"], 3), size)
    with pytest.raises(NotACall):
        outcome("abc", lambda cursor: cursor.until([":"], 9), size)
    assert outcome("ab:", lambda cursor: cursor.until([":"], 3), size) == (("ab", ":"), 3)


def test_dropped_text_counts_for_the_position() -> None:
    cursor = Cursor()
    cursor.append("abcde")
    cursor.at = 3
    cursor.drop()
    assert (cursor.text, cursor.at, cursor.position) == ("de", 0, 3)
    assert cursor.has(2) and not cursor.has(3)


@pytest.mark.parametrize(
    ("text", "mark", "size"),
    [
        ("a<to", "<tool>", 3),
        ("a", "<tool>", 0),
        ("<tool>", "<tool>", 0),
        ("aa", "aab", 2),
        ("", "x", 0),
        ("<<", "<a", 1),
    ],
)
def test_the_end_of_a_text_that_may_begin_a_mark(text: str, mark: str, size: int) -> None:
    assert overlap(text, mark) == size


def test_white_space_may_stand_between_words_alone() -> None:
    assert words_of("[TOOL_CALLS][ <a b></c>x y") == ["[TOOL_CALLS]", "[", "<", "a", "b>", "</c>", "x", "y"]
