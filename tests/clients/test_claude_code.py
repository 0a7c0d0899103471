"""Requests as Claude Code's documentation of gateways describes them, played for a task of three calls.

The program itself is not under a free licence.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.coding import ANSWER, CLAUDE_CODE, MODEL, NOTED, NOTES, SUM, final, task, written
from tests.clients.test_coding import ROOT, URL

BETAS = (
    *("claude-code-20250219", "interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"),
    *("context-management-2025-06-27", "prompt-caching-scope-2026-01-05", "effort-2025-11-24"),
)
HEADERS = {
    "authorization": "Bearer any",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": ",".join(BETAS),
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.332 (external, sdk-cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "0e0c1c5e-6c0e-4f0e-9d6c-3c1d3f3a2b1a",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
CACHED = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False}


def tool(name: str, **properties: Any) -> Any:
    schema = SCHEMA | {"properties": properties, "required": list(properties)}
    return {"name": name, "description": f"{name}.", "input_schema": schema, "eager_input_streaming": True}


TEXT = {"type": "string"}
TOOLS = [
    tool("Bash", command=TEXT),
    tool("Read", file_path=TEXT),
    tool("Write", file_path=TEXT, content=TEXT),
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
]


def system(attribution: str) -> list[Any]:
    """The first block differs from request to request."""
    return [
        {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1.332.a1b; cc_entrypoint=cli; cch={attribution};",
        },
        {"type": "text", "text": "You are a coding agent.", "cache_control": CACHED},
        {"type": "text", "text": "Be careful. " * 500, "cache_control": {"type": "ephemeral"}},
    ]


def body(messages: list[Any], attribution: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 32000,
        "system": system(attribution),
        "messages": messages,
        "tools": TOOLS,
        "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
    }


@contextmanager
def events(http: httpx.Client, asked: dict[str, Any]) -> Iterator[Iterator[Any]]:
    with http.stream("POST", "/v1/messages?beta=true", json=asked) as answer:
        assert answer.status_code == 200, answer.read()
        yield (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: "))


def message(http: httpx.Client, asked: dict[str, Any]) -> tuple[list[Any], str, Any]:
    """Read a stream as the documentation of streams says: the blocks, the reason to stop, the usage."""
    blocks: list[Any] = []
    reason, usage = "", {}
    with events(http, asked) as stream:
        for event in stream:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"partial_json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[
                    delta["type"]
                ]
                blocks[event["index"]][key] += delta[key]
            elif event["type"] == "message_delta":
                reason, usage = event["delta"]["stop_reason"], event["usage"]
    assert event["type"] == "message_stop"
    for block in blocks:
        arguments = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return blocks, reason, usage


def done(block: Any, work: Path) -> str:
    given = block["input"]
    if block["name"] == "Read":
        return Path(given["file_path"]).read_text()
    if block["name"] == "Write":
        Path(given["file_path"]).write_text(given["content"])
        return "File created."
    return subprocess.run(given["command"], shell=True, cwd=work, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(base_url=URL, headers=HEADERS, timeout=60) as made:
        yield made


def test_a_task_of_three_calls(http: httpx.Client) -> None:
    work = ROOT / CLAUDE_CODE / "work"
    work.mkdir(parents=True)
    (work / NOTES).write_text(NOTED)
    reminder = {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"}
    question = {"type": "text", "text": task(CLAUDE_CODE), "cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [reminder, question]}]
    called = []
    cached = []
    for turn in range(4):
        blocks, reason, usage = message(http, body(messages, f"{turn:05x}"))
        cached.append(usage["cache_read_input_tokens"])
        messages.append({"role": "assistant", "content": blocks})
        if reason != "tool_use":
            break
        (call,) = [block for block in blocks if block["type"] == "tool_use"]
        called.append(call["name"])
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": done(call, work), "is_error": False}
        messages.append({"role": "user", "content": [result | {"cache_control": {"type": "ephemeral"}}]})
    assert called == ["Read", "Write", "Bash"] and reason == "end_turn"
    assert (work / ANSWER).read_text() == written(CLAUDE_CODE) and final(CLAUDE_CODE) in blocks[-1]["text"]
    assert (work / SUM).read_text().split()[0] in json.dumps(messages)
    assert min(cached[1:]) > 5000 > cached[0], "the attribution is not part of the prompt"


def test_what_it_asks_beside(http: httpx.Client) -> None:
    """Tokens are counted, models are listed, and it looks whether the gateway is there."""
    asked = body([{"role": "user", "content": "Hello."}], "0")
    counted = {name: asked[name] for name in ("model", "system", "messages", "tools", "thinking")}
    assert http.post("/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"] > 6000
    listed = http.get("/v1/models?limit=1000").json()
    assert [each["id"] for each in listed["data"]] == [MODEL]
    assert http.head("/").status_code < 500
    title = asked | {"stream": False, "tools": [], "max_tokens": 64, "thinking": {"type": "disabled"}}
    title["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA | {"properties": {"title": TEXT}}}}
    answer = http.post("/v1/messages?beta=true", json=title)
    assert answer.status_code == 200, answer.text
