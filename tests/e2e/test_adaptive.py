"""K that adapts, through real services: no token changes, whatever is drafted and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from outrider.client import AsyncClient, Speculation
from tests.e2e.reference import assert_target_alone
from tests.e2e.streams import PROMPT
from tests.samples import total
from tests.stack import DEMO_TARGET, Stack, gateway_beside


@pytest.fixture(scope="module")
def adaptive(stack: Stack) -> Iterator[Stack]:
    with gateway_beside(stack, "--num-draft-tokens", "auto") as gateway:
        yield Stack(stack.target, stack.draft, gateway)


async def ask(client: AsyncClient, max_tokens: int, speculation: Speculation) -> tuple[list[int], int]:
    """Ids, and how many tokens were drafted for them."""
    answer = await client.generate(
        PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation=speculation
    )
    return [token.id for token in answer.choices[0].tokens], answer.usage.num_draft_tokens


async def test_what_is_planned_changes_no_token_alone_and_under_load(adaptive: Stack) -> None:
    async with AsyncClient(adaptive.grpc) as client:
        alone = await ask(client, 300, Speculation())
        together = await asyncio.gather(*(ask(client, 60 + 10 * i, Speculation()) for i in range(12)))
        fixed, num_fixed = await ask(client, 60, Speculation(num_draft_tokens=3))
        later = await ask(client, 100, Speculation())
    planned = [alone, later, *together]
    answers = [fixed, *(ids for ids, _ in planned)]
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, *((PROMPT, ids) for ids in answers))
    assert any(num for _, num in planned), "a draft that nothing is known of is tried"
    assert num_fixed >= 3
    metrics = adaptive.metrics()
    num_looked_up = total(metrics, "spec_lookup_total")
    assert 50 <= num_looked_up <= sum(len(ids) for ids in answers)


async def test_a_request_asks_for_it_by_name_over_http_too(adaptive: Stack) -> None:

    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=adaptive.http) as http:
        texts = []
        for wish in ("auto", 4, 0):
            reply = await http.post("/v1/completions", json=body | {"speculation": {"num_draft_tokens": wish}})
            assert reply.status_code == 200, reply.text
            texts.append(reply.json()["choices"][0]["text"])
    assert len(set(texts)) == 1
