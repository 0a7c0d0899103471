"""Chat templates that are rendered in this process: for tests that have no pool of renderers."""

from __future__ import annotations

import json
from typing import Any

from gateway.chat_template import ChatTemplate
from gateway.confined import templates
from gateway.confined.pool import WorkRefused
from outrider.wire.errors import InvalidRequest


class InlineRenderers:
    """Does at once what a process of the pool would do, through the same JSON."""

    async def run(self, caller: bytes, request: Any) -> Any:
        return work(request)


def work(request: Any) -> Any:
    try:
        return json.loads(json.dumps(templates.work(json.loads(json.dumps(request)))))
    except InvalidRequest as error:
        raise WorkRefused(error.message, error.param) from None


def inline_template(
    source: str, special_tokens: dict[str, str] | None = None, tool_source: str | None = None
) -> ChatTemplate:
    """Return a template of this source that is rendered in this process."""
    tool_source = source if tool_source is None else tool_source
    _, checked = work({"kind": "check", "sources": [source, tool_source]})
    return ChatTemplate(
        "the test's template",
        source,
        tool_source,
        special_tokens or {},
        checked["takes_tools"],
        checked["marks_turns"],
        InlineRenderers(),
    )
