"""An encoder-decoder pair served: its text is that of transformers' `generate`, whoever drafts and dies."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient, Speculation
from outrider.wire.errors import InvalidRequest
from tests.e2e.reference import Answer, compare, judge
from tests.stack import Stack, running

MAX_TOKENS = 48
PAIR = Path(__file__).parents[2] / "models" / "translation"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
TO_TRANSLATE = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()[:24]]
SOURCES = [*TO_TRANSLATE[:2], " ".join(TO_TRANSLATE[:10]), *TO_TRANSLATE[3:5], " ".join(TO_TRANSLATE[:4])]
"""One of 292 tokens, and another that begins like it."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(TARGET, DRAFT) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """Made by transformers in another process."""
    answers = judge(TARGET, generate=SOURCES, max_tokens=MAX_TOKENS).answers
    assert len({tuple(answer.ids) for answer in answers}) == len(SOURCES)
    return answers


@pytest.fixture(scope="module")
def translated() -> list[Answer]:
    return judge(TARGET, generate=TO_TRANSLATE, max_tokens=MAX_TOKENS).answers


def assert_equal(expected: Answer, ids: list[int]) -> None:
    difference = compare(expected, ids)
    assert difference is None or difference.near_tie, difference


@pytest.mark.parametrize("k", [0, 4, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 8))])
async def test_greedy_text_is_that_of_generate(client: AsyncClient, translated: list[Answer], k: int) -> None:
    wish = Speculation(num_draft_tokens=k)
    answers = await asyncio.gather(
        *(client.generate(text, max_tokens=MAX_TOKENS, temperature=0.0, speculation=wish) for text in TO_TRANSLATE)
    )
    for answer, wanted in zip(answers, translated, strict=True):
        assert_equal(wanted, [token.id for token in answer.choices[0].tokens])
        assert answer.usage.num_prompt_tokens == len(wanted.prompt_ids)
    assert bool(k) == any(answer.usage.num_accepted_tokens for answer in answers)


async def test_lookup_copies_from_the_source(client: AsyncClient) -> None:
    """Of four tokens the first two have no place in the answer before them, and the last is the target's own."""
    one, other = 400, 500
    answer = await client.generate(
        prompt_ids=[*[one] * 4, *[other] * 4],
        max_tokens=4,
        temperature=0.0,
        logit_bias={one: 100.0, other: 100.0},
        speculation=Speculation(drafter="lookup", num_draft_tokens=1),
    )
    assert answer.usage.num_draft_tokens


async def test_what_has_no_room_for_its_source_waits_and_what_never_will_is_refused(expected: list[Answer]) -> None:
    """The longest takes 23 of 40 blocks: two of those are never there at once, and whoever is older goes on."""
    with running(TARGET, None, target_args=("--kv-cache-tokens", "640")) as stack:
        async with AsyncClient(stack.grpc) as client:
            options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
            order = [2, 0, 5, 2, 1, 5, 3, 2]
            answers = await asyncio.gather(
                *(client.generate(SOURCES[i], **options, cache_salt=str(n)) for n, i in enumerate(order))
            )
            with pytest.raises(InvalidRequest, match=r"49 tokens and a source of 600 need 42 cache blocks.* has 40"):
                await client.generate(prompt_ids=[5] * 600, **options)
    for index, answer in zip(order, answers, strict=True):
        assert_equal(expected[index], [token.id for token in answer.choices[0].tokens])
