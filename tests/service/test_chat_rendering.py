"""Chat templates in the pool of renderers: one that would take for ever, or all memory, is refused by name, and nothing
else waits for it.
"""

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.chat_template import ChatTemplate, TemplateFile, Variant, create_renderers, template_of_files
from gateway.confined.pool import ConfinedPool
from gateway.confined.template_shape import TemplateShape
from outrider.wire.errors import ConfigError
from tests.service.front_door import in_process
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer

MAX_COMPILE_S = 0.1
CHAT = {"model": "models/demo/target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
HOSTILE = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than 0.1 s of CPU",
    "{% set n = namespace(t='xx') %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}": "takes more than",
    "{{ 'x' * 3000000000 }}": "takes more than 512 MiB",
    "{{ 'x'.center(3000000000) }}": "takes more than 512 MiB",
    "{{ '%3000000000d' | format(1) }}": "takes more than 512 MiB",
    "{{ messages | tojson(indent=999999999) }}": "takes more than 512 MiB",
    "{{ lipsum(n=1000000) }}": "refuses the messages: 'lipsum' is undefined",
    "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "has more than 75776 characters in the chat template",
}
"""What the refusal of a chat says by template."""


BROKEN = {
    "{{ 'x' * 400000000 }}": "takes more than 0.1 s of CPU time to compile",
    "{% break %}": "'break' outside loop",
    "{% macro m(a, a) %}{% endmacro %}": "duplicate argument",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
    "{{ " + "1" * 10_000 + " }}": "4300 digits",
    "x" * (1 << 21): "at most 1048576 are allowed",
}
"""What the gateway says at its start by template."""


@contextlib.asynccontextmanager
async def renderers() -> AsyncIterator[ConfinedPool]:
    pool = create_renderers(MAX_COMPILE_S)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def template_of(source: str, pool: ConfinedPool) -> ChatTemplate:
    return await ChatTemplate.compiled(TemplateFile("chat_template.jinja", source), {}, pool)


async def longest_hold_s(http: httpx.AsyncClient) -> float:
    """Ask how the gateway is until cancelled, and return the most CPU time that the event loop took in between."""
    longest_s = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began_s = time.thread_time()
            assert (await http.get("/healthz")).status_code == 200
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - began_s)
    return longest_s


@pytest.mark.usefixtures("no_collection")
async def test_a_template_that_takes_too_much_is_refused_and_nothing_waits_for_it() -> None:
    generator = ScriptedGenerator(demo_tokenizer())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with (
        renderers() as pool,
        in_process(generator) as http,
    ):
        watching = asyncio.create_task(longest_hold_s(http))
        for source, words in HOSTILE.items():
            generator.own_tokenizer.template = ChatTemplate("a template", Variant(source), {}, {}, pool)
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 400, source
            message = answer.json()["error"]["message"]
            assert words in message and "chat template" in message, message
        generator.own_tokenizer.template = await template_of("{{ messages[0].content }}", pool)
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        watching.cancel()
        assert await watching < 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before_kib + (200 << 10)


async def test_a_template_that_cannot_be_tried_within_the_limits_gets_texts(caplog: pytest.LogCaptureFixture) -> None:
    async with renderers() as pool:
        template = await template_of(next(iter(HOSTILE)), pool)
    assert template.default.shape == TemplateShape() and "takes more than 0.1 s of CPU time to be tried" in caplog.text


async def test_a_template_that_cannot_be_compiled_within_the_limits_is_named() -> None:
    async with renderers() as pool:
        for source, words in BROKEN.items():
            with pytest.raises(
                ConfigError, match=f"^chat_template.jinja .*{words}.*; give the gateway another"
            ) as caught:
                await template_of(source, pool)
            assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match=r"^chat_template\.jinja is no UTF-8"):
        template_of_files(b"\xff{{ messages }}", None, None)
