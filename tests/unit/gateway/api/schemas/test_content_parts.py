"""Parts of contents beside text."""

from typing import Any

import pytest

from gateway.api.schemas.parsing import parse_body
from gateway.generation import ServedFacts
from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.api.schemas.prompts_of import BODIES, USER, called, chat_of, prompt_of, result


async def test_results_of_tools_other_than_text() -> None:
    blocks = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "in"}]}},
        {"type": "search_result", "title": "t", "source": "u", "content": [{"type": "text", "text": "hit"}]},
        {"type": "tool_reference", "tool_name": "f"},
    ]
    found = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    use = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found, blocks[2]]}]
    told = "see\n[image left out]\nT\ndoc\n[document left out]\nin\nt\nu\nhit\nf"
    text = await prompt_of("messages", {"messages": messages})
    assert text == f"[user]a[assistant](read {{}})[tool]{told}[user]T\ndoc"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert (await chat_of(USER, called("{}"), result([image, {"text": "t"}]))).endswith("[tool][image left out]\nt")


@pytest.mark.parametrize(
    ("endpoint", "field", "part"),
    [
        ("chat", "messages", {"type": "image_url", "image_url": {"url": "x"}}),
        ("responses", "input", {"type": "input_image", "image_url": "x"}),
        ("messages", "messages", {"type": "image", "source": {"type": "url", "url": "x"}}),
    ],
)
def test_an_image_for_a_model_that_is_served_text_only_is_refused_by_that(
    endpoint: str, field: str, part: dict[str, Any]
) -> None:
    body = {"model": "seer", "max_tokens": 1, field: [{"role": "user", "content": [part]}]}
    served = (ServedFacts("m", 512, 320, 0, 1, None), ServedFacts("seer", 512, 320, 0, 1, None, text_only=True))
    for name, told in (("seer", True), ("m", False)):
        with pytest.raises(InvalidRequest, match=r"has a (part|block) of type") as refused:
            parse_body(BODIES[endpoint], body | {"model": name}, lambda: served)
        assert ("; seer is served text only: what reads images" in refused.value.message) is told
