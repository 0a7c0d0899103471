"""The answer begins behind the reasoning, wherever the pieces of the output are cut."""

import pytest

from gateway.tools.reasoning import MAX_SPACE_CHARS, AnswerFinder, begins_reasoning

MARKS = ("<think>", "</think>")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "in_reasoning", "answer"),
    [
        ("<think>a < b</think>\n\n yes\n", False, "yes\n"),
        ("a</think>yes</think>", True, "yes</think>"),
        (" plain <think>", False, " plain <think>"),
        ("<thin", False, "<thin"),
        ("<think>never ended</think", False, ""),
        ("<think>a</think> \n", False, ""),
    ],
)
def test_the_answer_of_an_output(text: str, in_reasoning: bool, answer: str, size: int) -> None:
    finder = AnswerFinder(MARKS, in_reasoning)
    found = "".join(finder.push(text[at : at + size]) for at in range(0, len(text), size))
    assert found + finder.finish() == answer
    assert finder.is_found is (answer != "")


def test_where_a_model_does_not_reason_all_is_answer_at_once() -> None:
    finder = AnswerFinder(None, False)
    assert finder.is_behind and finder.push("<think>") == "<think>"


def test_what_may_begin_reasoning_is_undecided() -> None:
    finder = AnswerFinder(MARKS, False)
    assert (finder.push(" <th"), finder.num_undecided_chars) == ("", 4)
    assert (finder.push("ing"), finder.num_undecided_chars) == (" <thing", 0)


@pytest.mark.parametrize(
    ("text", "is_final", "begins"),
    [
        (" \n<think>a", False, True),
        ("<th", False, None),
        ("<th", True, False),
        ("", False, None),
        ("a<think>", False, False),
        (" " * (MAX_SPACE_CHARS - 1), False, None),
        (" " * MAX_SPACE_CHARS, False, False),
        (" " * (MAX_SPACE_CHARS - 7) + "<think>", False, True),
        (" " * (MAX_SPACE_CHARS - 6) + "<think>", False, False),
    ],
)
def test_reasoning_begins_an_output_within_a_bound(text: str, is_final: bool, begins: bool | None) -> None:
    assert begins_reasoning(text, "<think>", final=is_final) is begins
