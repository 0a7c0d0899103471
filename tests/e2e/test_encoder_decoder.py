"""An encoder-decoder pair served: its text is that of transformers' `generate`, whoever drafts and dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AcceptanceRule, AsyncClient, Round, Speculation
from outrider.wire.errors import InvalidRequest
from tests.e2e.reference import Answer, compare, judge
from tests.e2e.streams import Seen, plain, speculative
from tests.stack import Process, Stack, running, wait_until_nothing_is_held

MAX_TOKENS = 48
LONG = 240
"""Tokens of a stream that outlives a worker."""
PAIR = Path(__file__).parents[2] / "models" / "translation"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
TO_TRANSLATE = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()[:24]]
SOURCES = [*TO_TRANSLATE[:2], " ".join(TO_TRANSLATE[:10]), *TO_TRANSLATE[3:5], " ".join(TO_TRANSLATE[:4])]
"""One of 292 tokens, and another that begins like it."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def t5() -> Iterator[Stack]:
    """A target that takes 30 ms longer a step, so that streams outlive a restart."""
    with running(TARGET, DRAFT, target_module="tests.e2e.faults.paced_target") as stack:
        yield stack


@pytest.fixture
async def client(t5: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(t5.grpc) as made:
        yield made


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


@pytest.mark.slow
async def test_a_draft_killed_in_the_middle_changes_no_token(t5: Stack, client: AsyncClient) -> None:
    options: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True}
    sampled, coupled = options | {"temperature": 0.7, "seed": 5}, AcceptanceRule.COUPLED
    streams = [
        client.stream(SOURCES[2], temperature=0.0, **options),
        client.stream(SOURCES[2], speculation=Speculation(acceptance=coupled), **sampled),
    ]
    seen = [Seen() for _ in streams]

    async def read_all(enough: Callable[[list[Round]], bool]) -> None:
        await asyncio.gather(*(one.read(stream, enough) for one, stream in zip(seen, streams, strict=True)))

    await read_all(speculative(4))
    assert t5.draft is not None
    t5.draft.kill()
    await read_all(plain(4))
    await asyncio.to_thread(again, t5, "draft")
    await read_all(speculative(4))
    for stream in streams:
        await stream.aclose()
    sampled["max_tokens"] = len(seen[1].ids)
    drawn = await client.generate(SOURCES[2], speculation=Speculation(enabled=False, acceptance=coupled), **sampled)
    assert seen[0].ids == await asyncio.to_thread(alone, TARGET, SOURCES[2], len(seen[0].ids))
    assert seen[1].ids == [token.id for token in drawn.choices[0].tokens]


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


@pytest.mark.slow
async def test_a_target_that_comes_back_reads_the_source_again(t5: Stack, client: AsyncClient) -> None:
    """And begins its windows anew."""
    options: dict[str, Any] = {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    wishes = [Speculation(drafter=drafter) for drafter in (None, "lookahead")]
    streams, seen = [client.stream(SOURCES[4], speculation=wish, **options) for wish in wishes], [Seen(), Seen()]

    async def read_all(enough: Callable[[list[Round]], bool]) -> None:
        await asyncio.gather(*(one.read(stream, enough) for one, stream in zip(seen, streams, strict=True)))

    await read_all(lambda rounds: sum(r.num_drafted > 0 for r in rounds) == 3)
    num_before = [len(one.rounds) for one in seen]
    t5.target.kill()
    await asyncio.to_thread(again, t5, "target")
    await read_all(lambda rounds: False)
    assert all(any(r.num_drafted for r in one.rounds[num:]) for one, num in zip(seen, num_before, strict=True))
    assert [one.ids for one in seen] == [await asyncio.to_thread(alone, TARGET, SOURCES[4], LONG)] * 2
    await asyncio.to_thread(wait_until_nothing_is_held, t5)


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


def again(stack: Stack, name: str) -> None:
    """A new life at the address of the old one."""
    old: Process = getattr(stack, name)
    setattr(stack, name, old.again())


def alone(target: str, source: str, num_tokens: int) -> list[int]:
    """What the target writes where its end counts for nothing."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(target)(source, return_tensors="pt")
    model = AutoModelForSeq2SeqLM.from_pretrained(target, dtype=torch.float32).eval()
    made = model.generate(**ids, do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1)
    return [int(token_id) for token_id in made[0, 1:]]
