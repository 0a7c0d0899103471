"""Proposals that are trees, through the real system: the text is that of plain decoding, whatever their shape.

With --batch-invariant there are no near-ties: what a tree's round left wrong in a cache would change what follows.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.client import AcceptanceRule, AsyncClient, Speculation
from tests.stack import Stack, running
from tests.tiny_models import perturbed_copy, tiny_llama

NUM_PROMPTS = 12
MAX_TOKENS = 40
TREES = ("4x2x1", "best:12x4", "1x1x1x1", "2x2x2x2", "best:5x5", "6", None)
"""By prompt in turn, so that trees of all shapes, and chains, share a forward; None = a chain."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.7},
    "coupled": {"temperature": 0.8},
    "coupled, penalised": {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.8, "min_tokens": 10},
}

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Text:
    ids: list[int]
    num_drafted: int
    num_accepted: int
    num_rounds: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("trees")
    target = tiny_llama(folder / "target", seed=3, sharpness=3.0)
    return target, perturbed_copy(target, folder / "draft", noise=0.25)


@contextlib.contextmanager
def trees_on(models: tuple[str, str], kv_cache_tokens: int, path: str | None = None) -> Iterator[Stack]:
    """path: of both workers' attention; None = the target's is batch-invariant."""
    memory = ("--kv-cache-tokens", str(kv_cache_tokens))
    taken = () if path is None else ("--attention-path", path)
    target = (*memory, *(taken or ("--batch-invariant",)), "@target_service.leases.hold.MAX_HOLD_S=3")
    with running(*models, target_args=target, draft_args=(*memory, *taken)) as started:
        yield started


@pytest.fixture(scope="module")
def stack(models: tuple[str, str]) -> Iterator[Stack]:
    with trees_on(models, 4096) as started:
        yield started


def prompts() -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(2, 320) for _ in range(generator.randrange(1, 30))] for _ in range(NUM_PROMPTS)]


async def generate_all(stack: Stack, kind: str, *, speculate: bool, at_once: int) -> list[Text]:
    places = asyncio.Semaphore(at_once)

    async def one(client: AsyncClient, index: int, prompt: list[int]) -> Text:
        wish = Speculation(enabled=speculate, acceptance=AcceptanceRule.COUPLED, tree=TREES[index % len(TREES)])
        async with places:
            made = await client.generate(
                prompt_ids=prompt, max_tokens=MAX_TOKENS, seed=index, speculation=wish, **KINDS[kind]
            )
        usage = made.usage
        ids = [token.id for token in made.choices[0].tokens]
        return Text(ids, usage.num_draft_tokens, usage.num_accepted_tokens, usage.num_rounds)

    async with AsyncClient(stack.grpc) as client:
        return await asyncio.gather(*(one(client, index, prompt) for index, prompt in enumerate(prompts())))


@pytest.mark.parametrize("kind", KINDS)
async def test_the_text_is_that_of_plain_decoding(stack: Stack, kind: str) -> None:
    await check_trees(stack, kind)


async def check_trees(stack: Stack, kind: str) -> None:
    assert stack.target_info().supports_trees and stack.draft_info().supports_trees
    plain = await generate_all(stack, kind, speculate=False, at_once=1)
    loaded = await generate_all(stack, kind, speculate=True, at_once=NUM_PROMPTS)
    assert [text.ids for text in loaded] == [text.ids for text in plain]
    assert sum(text.num_accepted for text in loaded) > 2 * NUM_PROMPTS  # paths were kept
    trees = [text for index, text in enumerate(loaded) if TREES[index % len(TREES)] in ("4x2x1", "2x2x2x2")]
    assert all(text.num_drafted > 8 * text.num_rounds for text in trees)  # of many nodes, to the end
    assert stack.metrics()["spec_proposals_refused_total"] == 0
