"""Prompts that bodies of every endpoint become."""

from typing import Any

from pydantic import BaseModel

from gateway.admission.prompts import ChatSettings, PromptReader
from gateway.admission.text_threads import TextThreads
from gateway.api.layers.messages_schemas import MessagesBody
from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from tests.rendering import inline_template
from tests.service.scripted_generator import config, demo_tokenizer

TOKENIZER = demo_tokenizer()
PLAIN = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.thinking %}<{{ m.thinking }}>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}"
)
BODIES: dict[str, type[BaseModel]] = {"chat": ChatBody, "responses": ResponsesBody, "messages": MessagesBody}
USER = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {}}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "b", **fields}


def result(content: Any = "failed", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **fields}


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


async def chat_of(*messages: dict[str, Any], template: str = PLAIN, **body: Any) -> str:
    return await prompt_of("chat", {"messages": list(messages), **body}, template)


def called(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "read", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


async def prompt_of(endpoint: str, body: dict[str, Any], template: str = PLAIN, **settings: Any) -> str:
    """Return the prompt of a request. Raise InvalidRequest."""
    needed = {"max_tokens": 1} if endpoint == "messages" else {}
    (chat,) = parse_body(BODIES[endpoint], needed | body).unchecked_request("id").prompts  # type: ignore[attr-defined]
    TOKENIZER.template = inline_template(template, TOKENIZER.special_tokens)
    chats = ChatSettings.from_config(config(**settings))
    reader = PromptReader(TOKENIZER, 1 << 20, b"", TextThreads(), 4 << 20, chats)
    return await reader.render("messages", chat)
