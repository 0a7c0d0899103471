"""With --batch-invariant, text under load and speculation is that of plain decoding alone, greedy and with coupled
acceptance at any temperature: no near-tie forgiven.

Elsewhere a near-tie may fall either way with the shape of a batch, and the parity tests list such cases. Here the
logits are the same bits whatever else a forward holds, so the ids must be equal to the last one, in bfloat16, too.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from benchmarks.common import REPETITIVE, read_prompts
from outrider.client import AcceptanceRule, AsyncClient, Drafter, Speculation
from tests.stack import Stack, running

NUM_PROMPTS = 16
MAX_TOKENS = 48
CONCURRENCY = 16
TEMPERATURES = (0.0, 1.0)
NUM_DRAFT_TOKENS = (1, 4, 8)
"""By prompt in turn, so that verifies of several widths share a forward."""

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Text:
    ids: list[int]
    num_drafted: int
    num_accepted: int


async def generate_all(
    stack: Stack,
    prompts: Sequence[str],
    temperature: float,
    concurrency: int,
    drafter: Drafter | None,
    max_tokens: int = MAX_TOKENS,
) -> list[Text]:
    """drafter: None is plain decoding."""
    places = asyncio.Semaphore(concurrency)

    async def one(client: AsyncClient, index: int, prompt: str) -> Text:
        k = NUM_DRAFT_TOKENS[index % len(NUM_DRAFT_TOKENS)]
        wishes = Speculation(drafter is not None, k, acceptance=AcceptanceRule.COUPLED, drafter=drafter)
        async with places:
            made = await client.generate(
                prompt, max_tokens=max_tokens, temperature=temperature, seed=index, ignore_eos=True, speculation=wishes
            )
        choice = made.choices[0]
        usage = made.usage
        return Text([token.id for token in choice.tokens], usage.num_draft_tokens, usage.num_accepted_tokens)

    async with AsyncClient(stack.grpc) as client:
        return await asyncio.gather(*(one(client, index, prompt) for index, prompt in enumerate(prompts)))


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def invariant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    arguments = ("--batch-invariant", "--dtype", request.param)
    with running(target_args=arguments, log_folder=tmp_path_factory.mktemp("invariant")) as stack:
        info = stack.target_info()
        assert info.is_batch_invariant
        assert info.dtype == request.param
        yield stack


async def test_loaded_and_speculative_equals_alone_and_plain(invariant: Stack, dev_prompts: list[str]) -> None:
    prompts = dev_prompts[:NUM_PROMPTS]
    alone, loaded = list[Text](), list[Text]()
    for temperature in TEMPERATURES:
        alone += await generate_all(invariant, prompts, temperature, 1, None)
        loaded += await generate_all(invariant, prompts, temperature, CONCURRENCY, Drafter.MODEL)
    assert all(len(text.ids) == MAX_TOKENS and text.num_drafted == 0 for text in alone)
    assert sum(text.num_drafted for text in loaded) > len(loaded) * MAX_TOKENS / 2  # verifies of many widths ran
    for first in range(0, len(loaded), NUM_PROMPTS):  # guesses came true at each temperature
        assert sum(text.num_accepted for text in loaded[first : first + NUM_PROMPTS]) > NUM_PROMPTS
    different = [index for index, (one, other) in enumerate(zip(alone, loaded, strict=True)) if one.ids != other.ids]
    assert not different


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_who_drafts_changes_no_coupled_text(invariant: Stack, temperature: float) -> None:
    """The text repeats itself, so that there is something to draft."""
    prompts = [prompt.text for prompt in read_prompts(REPETITIVE)][::6]
    plain = await generate_all(invariant, prompts, temperature, 1, None, max_tokens=32)
    for drafter in (Drafter.NGRAM, Drafter.LOOKUP):
        drafted = await generate_all(invariant, prompts, temperature, len(prompts), drafter, max_tokens=32)
        assert [text.ids for text in drafted] == [text.ids for text in plain], drafter
        assert sum(text.num_accepted for text in drafted) > len(prompts), drafter
