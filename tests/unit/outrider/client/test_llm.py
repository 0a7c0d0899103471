"""`LLM`: a list of prompts, and their sampling."""

from __future__ import annotations

import pytest

from outrider.client.llm import _asked, _chats, _prompts
from outrider.wire import errors


def test_an_llms_input_is_one_or_a_list_of_such() -> None:
    message = {"role": "user", "content": "hello"}
    assert _prompts("one") == ["one"] and _prompts([1, 2]) == [[1, 2]] and _prompts(["a", [1]]) == ["a", [1]]
    assert _chats([message]) == [[message]] and _chats([[message], [message]]) == [[message], [message]]
    assert _chats("hello") == ["hello"] and _chats(message) == [message] and _chats([]) == _prompts([]) == []
    for wrong in (5, b"hello", {"a": 1}):
        with pytest.raises(errors.InvalidRequest, match=r"prompts is .*, must be a text"):
            _prompts(wrong)  # type: ignore[arg-type]
    assert _asked("one") == ("one", {}) and _asked([1, 2]) == (None, {"prompt_ids": [1, 2]})
    for wrong in (1.5, None, b"hello"):
        with pytest.raises(errors.InvalidRequest, match=r"prompts holds .*, must hold texts or lists"):
            _asked(wrong)
