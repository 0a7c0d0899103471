"""`LLM`: a list of prompts, and their sampling."""

from typing import Any

import pytest

from outrider.client.llm_inputs import max_choices, read_chats, read_prompts, read_sampling
from outrider.wire import errors


def test_an_llms_input_is_one_or_a_list_of_such() -> None:
    message = {"role": "user", "content": "hello"}
    text, ids, chat = ("one", {}), (None, {"prompt_ids": [1, 2]}), (None, {"messages": [message]})
    assert (
        read_prompts("one") == [text] and read_prompts([1, 2]) == [ids] and read_prompts(["one", [1, 2]]) == [text, ids]
    )
    assert read_chats([message]) == [chat] and read_chats([[message], [message]]) == [chat, chat]
    assert read_chats([]) == read_prompts([]) == []
    for wrong in ("hello", message):
        assert read_chats(wrong) == [(None, {"messages": wrong})]  # type: ignore[arg-type]
    for wrong in (5, b"hello", {"a": 1}):
        with pytest.raises(errors.InvalidRequest, match=r"prompts is .*, must be a text"):
            read_prompts(wrong)  # type: ignore[arg-type]
    for wrong in (1.5, None, b"hello"):
        with pytest.raises(errors.InvalidRequest, match=r"prompts holds .*, must hold texts or lists"):
            read_prompts([wrong])  # type: ignore[list-item]


def test_an_llms_sampling_is_one_or_one_of_each_prompt() -> None:
    two = [{"n": 2}, {}]
    assert (
        read_sampling(None, 2) == [{}, {}] and read_sampling(two[0], 2) == [two[0]] * 2 and read_sampling(two, 2) == two
    )
    for wrong in (5, "ab", b"ab", [None, None], [{}, 5]):
        with pytest.raises(errors.InvalidRequest, match=r"sampling is .*, must be a dict"):
            read_sampling(wrong, 2)
    with pytest.raises(errors.InvalidRequest, match="sampling has 2 entries for 3 prompts"):
        read_sampling(two, 3)
    assert max_choices([("a", {"n": 2}), ("b", {})]) == 2
    odd: list[Any] = [("a", {"n": n}) for n in (None, "x", 0, -1, 1.5)]
    assert max_choices(odd) == max_choices([]) == 1, "they are refused where they are sent"
