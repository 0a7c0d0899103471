"""Beam search through the gateway is, token for token, transformers' own of the target alone, whatever a draft does."""

import asyncio
from typing import Any

import httpx
import pytest

from outrider.client import AsyncClient, Choice, Speculation
from tests.e2e.reference import Searched, beams
from tests.e2e.streams import PROMPT
from tests.e2e.test_parity import ENDINGS
from tests.stack import DEMO_TARGET, Stack

MAX_TOKENS = 32
NEAR_TIE = 1e-4
"""Two answers of scores that are closer, in nats, may stand the other way around."""
SEARCHES = [
    (4, 1.0, True),
    *(
        pytest.param(*search, marks=pytest.mark.slow)
        for search in [(2, 1.0, False), (4, 0.0, "never"), (8, 2.0, False)]
    ),
]
"""Width, length penalty and early stopping. `tests/unit/target_service/leases/test_slot_search.py` has more of them,
without services.
"""

pytestmark = pytest.mark.timeout(600)


async def search(
    client: AsyncClient, prompt: str, width: int, penalty: float, stopping: Any, **rest: Any
) -> tuple[Choice, ...]:
    options = {"max_tokens": MAX_TOKENS, "n": width, "length_penalty": penalty, "early_stopping": stopping}
    return (await client.generate(prompt, use_beam_search=True, **{**options, **rest})).choices


def differences(found: tuple[Choice, ...], expected: list[Searched]) -> list[str]:
    """Those that are no near-ties."""
    assert len(found) == len(expected)
    wrong = list[str]()
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.score is not None and one.index == place
        if [token.id for token in one.tokens] != other.ids and abs(one.score - other.score) >= NEAR_TIE:
            wrong.append(f"answer {place}: {[token.id for token in one.tokens]} for {other}, scored {one.score}")
    return wrong


@pytest.mark.parametrize(("width", "penalty", "stopping"), SEARCHES)
async def test_answers_are_transformers_own_with_drafts_and_without(
    client: AsyncClient,
    dev_prompts: list[str],
    width: int,
    penalty: float,
    stopping: bool | str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = [*dev_prompts[:3], *ENDINGS]
    expected = await asyncio.to_thread(beams, DEMO_TARGET, prompts, width, MAX_TOKENS, penalty, stopping)
    num_passes: dict[int | str, int] = {}
    rest = (width, penalty, stopping)
    for k in (0, "auto", 5):
        enabled, speculation = k == 5, Speculation(num_draft_tokens=k)
        found = await asyncio.gather(*(search(client, p, *rest, speculation=speculation) for p in prompts))
        for prompt, one, other in zip(prompts, found, expected, strict=True):
            assert not differences(one, other), f"{prompt[-60:]!r}, K {k}"
        usages = [choices[0].usage for choices in found]
        num_passes[k] = sum(usage.num_rounds + usage.num_plain_steps for usage in usages)
        assert all(not each.usage.num_rounds for choices in found for each in choices[1:])
        assert k == "auto" or enabled is any(usage.num_accepted_tokens for usage in usages)
    with capsys.disabled():
        print(f"\n{width} beams, passes by K: {num_passes}")
    assert num_passes[5] < {2: 0.7, 4: 0.8, 8: 0.9}[width] * num_passes[0]
    ids = [answer.ids for answers in expected for answer in answers]
    assert min(map(len, ids)) < MAX_TOKENS


async def test_over_http_whole_and_as_a_stream(stack: Stack, client: AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "n": 4, "use_beam_search": True, "max_tokens": 32, "length_penalty": 0.5}
    found = await search(client, PROMPT, 4, 0.5, False, max_tokens=32)
    async with httpx.AsyncClient(base_url=stack.http, timeout=60) as http:
        whole = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        assert [choice["text"] for choice in whole["choices"]] == [each.text for each in found]
        assert whole["usage"]["completion_tokens"] == sum(len(each.tokens) for each in found)
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True, "n": 2}) as reply:
            events = [line async for line in reply.aiter_lines() if line.startswith("data: {")]
        assert len(events) == 2
        two = body | {"prompt": [PROMPT, "def f(x):\n"], "n": 2}
        both = (await http.post("/v1/completions", json=two)).raise_for_status().json()
        assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
        messages = [{"role": "user", "content": "def f(x):"}]
        rest = {"n": 3, "use_beam_search": True, "max_tokens": 8, "early_stopping": "never"}
        chat = (await http.post("/v1/chat/completions", json={"messages": messages} | rest)).raise_for_status().json()
        assert len(chat["choices"]) == 3
