"""Templates of every kind."""

from typing import Any

from transformers import AutoTokenizer

from gateway.admission.prompts import ChatSettings, PromptReader
from gateway.admission.text_threads import TextThreads
from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.tokenizer import Tokenizer
from tests.rendering import inline_template
from tests.service.scripted_generator import DEMO, config, demo_tokenizer

TOKENIZER = demo_tokenizer()
THEIRS = AutoTokenizer.from_pretrained(str(DEMO))
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False},
}


def loop(body: str) -> str:
    """Return a template that writes each message `m` so."""
    return "{% for m in messages %}[{{ m.role }}]" + body + "{% endfor %}"


async def rendered(template: str | Tokenizer, messages: list[dict[str, Any]], **body: Any) -> str:
    """Return the prompt of a request of these messages."""
    tokenizer = template
    if isinstance(template, str):
        tokenizer = TOKENIZER
        tokenizer.template = inline_template(template, tokenizer.special_tokens)
    assert isinstance(tokenizer, Tokenizer)
    (chat,) = parse_body(ChatBody, {"messages": messages, **body}).unchecked_request("id").prompts
    settings = ChatSettings.from_config(config())
    reader = PromptReader(tokenizer, 2048, b"", TextThreads(), 1 << 20, settings)
    return await reader.render("messages", chat)


def expected(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    text = THEIRS.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True, **options
    )
    return str(text)
