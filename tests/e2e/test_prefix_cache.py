"""A prompt that begins like an earlier one is not computed again, on neither worker, and no text shows it."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from outrider.client import AsyncClient, Usage
from tests.stack import Stack, read_metrics, running, wait_until_nothing_is_held
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")  # grpc.aio does not stand several loops in one process

VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 9M parameters: 1,500 tokens of prompt take a hundred times as long as a step."""
    folder = tmp_path_factory.mktemp("wide")
    return tiny_llama(folder, VOCAB_SIZE, hidden_size=512, num_layers=4, context=2048, sharpness=3.0)


@pytest.fixture(scope="module")
def wide_stack(wide: str) -> Iterator[Stack]:
    """The same model as target and as draft: both have the same prompts to feed."""
    with running(wide, wide, target_args=("@target_service.leases.hold.MAX_HOLD_S=3",)) as stack:
        yield stack


def some_ids(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(count)]


@dataclass(frozen=True)
class Timed:
    ids: list[int]
    first_s: float
    """Time to the first token."""
    usage: Usage


async def ask(client: AsyncClient, prompt: list[int], **options: object) -> Timed:
    started_s, first_s, ids, usage = time.monotonic(), None, [], None
    wishes = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "speculation": False, **options}
    async with client.stream(prompt_ids=prompt, **wishes) as rounds:
        async for each in rounds:
            first_s = time.monotonic() - started_s if first_s is None else first_s
            ids += [token.id for token in each.tokens]
            usage = each.usage
    assert first_s is not None and usage is not None
    return Timed(ids, first_s, usage)


def hits(stack: Stack, worker: str) -> float:
    info = stack.target_info() if worker == "target" else stack.draft_info()
    samples = read_metrics(f"http://{info.metrics_address}/metrics")
    return samples[f'outrider_worker_prefix_hit_tokens_total{{worker="{worker}"}}']


async def test_speculation_over_cached_prompts_gives_the_same_text_and_salts_keep_apart(wide_stack: Stack) -> None:
    prompt, both = some_ids(100, 600), ("target", "draft")
    async with AsyncClient(wide_stack.grpc) as client:
        cold = await ask(client, prompt, speculation=True)
        before = [hits(wide_stack, worker) for worker in both]
        salted = await ask(client, prompt, speculation=True, cache_salt="mine")
        assert [hits(wide_stack, worker) for worker in both] == before
        warm = await ask(client, prompt, speculation=True)
        assert [hits(wide_stack, worker) - n for worker, n in zip(both, before, strict=True)] == [96, 96]
        again = await ask(client, prompt, speculation=True, cache_salt="mine")
    assert cold.ids == salted.ids == warm.ids == again.ids
    cached = [timed.usage.num_cached_prompt_tokens for timed in (cold, salted, warm, again)]
    assert cached == [0, 0, 96, 96]
    assert all(timed.usage.num_draft_tokens for timed in (cold, warm))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("narrow"), VOCAB_SIZE, sharpness=3.0)


async def test_a_pool_that_evicts_all_the_time_gives_the_same_answers(narrow: str) -> None:
    """Prompts of three families, so that some of what is asked for is there and some has just been given up."""
    heads = [some_ids(48, 800 + family) for family in range(3)]
    prompts = [heads[i % 3][: 16 * (1 + i % 3)] + some_ids(20, 900 + i % 7) for i in range(36)]
    with running(narrow, None, target_args=("--kv-cache-tokens", "256")) as stack:
        expected = await answers_of(stack, prompts, [f"nobody else's {i}" for i in range(36)])
        assert hits(stack, "target") == 0
        assert await answers_of(stack, prompts, ["everybody's"] * 36) == expected
        wait_until_nothing_is_held(stack)
        info = stack.target_info()
        assert hits(stack, "target") > 0
        assert 0 < info.num_kv_blocks_cached <= 16
        evictions = read_metrics(f"http://{info.metrics_address}/metrics")
    assert evictions['outrider_worker_prefix_evictions_total{worker="target"}'] > 16


async def answers_of(stack: Stack, prompts: list[list[int]], salts: list[str]) -> list[list[int]]:
    """Greedy, four at a time."""
    limit = asyncio.Semaphore(4)

    async def one(client: AsyncClient, prompt: list[int], salt: str) -> list[int]:
        wishes = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "cache_salt": salt or None}
        async with limit:
            answer = await client.generate(prompt_ids=prompt, **wishes)
        return [token.id for token in answer.choices[0].tokens]

    async with AsyncClient(stack.grpc) as client:
        return list(await asyncio.gather(*map(one, [client] * len(prompts), prompts, salts)))
