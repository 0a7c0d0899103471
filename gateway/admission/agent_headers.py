"""Drops a header line that some coding agents put before their system prompt, with another value in each request.

The model does not need the line. At the start of the prompt, it would make every prompt miss the prefix cache.
"""

from __future__ import annotations

from typing import Any

from gateway.confined.template_shape import SYSTEM_ROLES, Message

PREFIX = "x-anthropic-billing-header:"
"""Beginning of a header line that a coding agent puts before its system prompt. Such lines differ from request to
request and are dropped."""


def without_agent_headers(messages: list[Message]) -> list[Message]:
    """Return the chat without the header line (see PREFIX) that a coding agent puts before its system prompt.

    It may begin a system message or a part of one. A message that contains nothing else is dropped.
    """
    kept = []
    for message in messages:
        content = message["content"]
        if message["role"] not in SYSTEM_ROLES or not _has_header(content):
            kept.append(message)
        elif rest := _without_header(content):
            kept.append({**message, "content": rest})
    return kept


def _has_header(content: Any) -> bool:
    if isinstance(content, str):
        return content.startswith(PREFIX)
    return any(part["text"].startswith(PREFIX) for part in content)


def _without_header(content: Any) -> Any:
    if isinstance(content, str):
        return _without_first_line(content)
    parts = []
    for part in content:
        text = _without_first_line(part["text"])
        if text:
            parts.append({**part, "text": text})
    return parts


def _without_first_line(text: str) -> str:
    if not text.startswith(PREFIX):
        return text
    return text.partition("\n")[2]
