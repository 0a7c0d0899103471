"""A draft service without a model: what it drafts for is said as it would be without, whatever becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.stack import DEMO_TARGET, Stack, running

MAX_TOKENS = 64
GREEDY: dict[str, Any] = {"temperature": 0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Batch-invariant: what is said depends on no batch, to the last bit."""
    ngram = ("--drafter", "ngram")
    with running(DEMO_TARGET, DEMO_TARGET, target_args=("--batch-invariant",), draft_args=ngram) as started:
        yield started


@pytest.fixture(scope="module")
def prompts(dev_prompts: list[str]) -> list[str]:
    """Some that repeat themselves, and some that do not."""
    tests = "".join(f"    def test_{name}(self):\n        self.assertEqual({name}(), None)\n\n" for name in "abcd")
    return [
        f"class Tests(unittest.TestCase):\n{tests}    def test_e(",
        "x = [1, 2, 3, 1, 2, 3, 1, 2,",
        *dev_prompts[:4],
    ]


async def answers(stack: Stack, prompts: list[str], how: dict[str, Any], **speculation: Any) -> list[dict[str, Any]]:
    """Side by side."""

    async def one(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
        wish = {"acceptance": "coupled", **speculation}
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "speculation": wish, **how}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async with httpx.AsyncClient(base_url=stack.http, timeout=120) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in prompts))


def texts(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["choices"][0]["text"] for body in bodies]


def num_accepted(bodies: list[dict[str, Any]]) -> int:
    return sum(body["usage"]["speculation"]["num_accepted_tokens"] for body in bodies)


async def until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.01)


async def test_it_may_die_and_come_back(stack: Stack, prompts: list[str]) -> None:
    alone = texts(await answers(stack, prompts, COUPLED, enabled=False))
    running = asyncio.create_task(answers(stack, prompts, COUPLED, num_draft_tokens=8))
    draft = stack.draft
    assert draft is not None
    await until(lambda: stack.draft_info().num_slots_in_use > 0)
    draft.kill()
    assert texts(await running) == alone
    stack.draft = await asyncio.to_thread(draft.again)

    async def drafts_again() -> bool:
        return num_accepted(await answers(stack, prompts[:1], GREEDY)) > 0

    give_up_s = time.monotonic() + 30
    while not await drafts_again():
        assert time.monotonic() < give_up_s, "no drafts"
    await until(lambda: stack.draft_info().num_slots_in_use == 0)
    assert stack.target_info().num_leases == 0
