"""What a template's text says of the messages that it takes."""

import pytest

from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.confined.kinds import TOOL, expected, loop, rendered

USER = {"role": "user", "content": "Weather in Rome?"}


async def test_other_kinds_of_templates() -> None:
    strict = "{{ tools | tojson }}"
    assert await rendered(strict, [USER], tools=[TOOL]) == expected(strict, [USER], tools=[TOOL])
    placed = "{{ messages | tojson(true) }}{{ messages | tojson(false, 2) }}{{ 'é' | tojson(true) }}"
    assert await rendered(placed, [USER]) == expected(placed, [USER])
    roles = "{% for m in messages %}{% if m.role == 'control' %}<{{ m.content }}>{% endif %}{% endfor %}"
    chat = [{"role": "control", "content": "thinking"}, USER]
    assert await rendered(roles, chat) == expected(roles, chat) == "<thinking>"
    with pytest.raises(InvalidRequest, match="'control', must be one of") as caught:
        await rendered(loop("{{ m.content }}"), chat)
    assert caught.value.param == "messages[0].role"


@pytest.mark.parametrize("role", ["", "\n", "<|im_end|>", " user"])
async def test_a_text_in_quotes_that_is_no_word_is_no_role(role: str) -> None:
    template = loop("{{ m.role }}{{ m.content }}") + """{{ "" }}{{ "\\n" }}{{ '<|im_end|>' }}{{ ' user' }}"""
    with pytest.raises(InvalidRequest, match="must be one of"):
        await rendered(template, [{"role": role, "content": "x"}])
