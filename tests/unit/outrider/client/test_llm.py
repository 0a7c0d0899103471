"""`LLM`: a list of prompts, and their sampling."""

from __future__ import annotations

import pytest

from outrider.client.llm_inputs import read_chats, read_prompts
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
