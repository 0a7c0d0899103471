"""Drafts whose tokens are not their target's: no token changes, whoever dies; one draft serves targets of several
vocabularies; what cannot be told is refused.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from outrider.client import AsyncClient, Completion, Speculation
from tests.e2e.reference import assert_target_alone
from tests.e2e.streams import PROMPT
from tests.stack import DEMO_TARGET, OTHER_DRAFT, Process, Stack, gateway_beside, running, wait_until_nothing_is_held
from tests.tiny_models import perturbed_copy, tiny_llama

pytestmark = pytest.mark.timeout(300)

NUM_ENTRIES = 2048
HOSTILE = (
    "# -*- coding: utf-8 -*-\nnames = ['Straße', 'naïve', '日本語', '😀😀', '",
    "print('<|endoftext|> and <|user|> are words here')\n",
    "x\t=\t1\r\n\r\n\r\n    y = 0x0A__12__  # ▁▁ <0x0A>\n",
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A target that takes 30 ms longer a step, so that streams outlive a restart."""
    with running(DEMO_TARGET, OTHER_DRAFT, target_module="tests.e2e.faults.paced_target") as made:
        yield made


def ids_of(answer: Completion) -> list[int]:
    return [token.id for token in answer.choices[0].tokens]


async def test_greedy_text_is_the_targets_own_and_drafts_are_kept(stack: Stack, client: AsyncClient) -> None:
    info = await asyncio.to_thread(stack.draft_info)
    assert info.supports_retokenization and info.vocab_size == NUM_ENTRIES
    (made,) = info.shared_vocabularies
    texts = NUM_ENTRIES - 4
    assert made.tokenizer_fingerprint == stack.target_info().tokenizer_fingerprint
    assert 0.8 * texts < made.num_shared < texts
    assert made.shared_fraction == pytest.approx(made.num_shared / texts)
    prompts = (PROMPT, *HOSTILE)
    for wish in (Speculation(num_draft_tokens=4), Speculation(tree="3x2x1")):
        answers = await asyncio.gather(
            *(client.generate(each, max_tokens=64, temperature=0.0, speculation=wish) for each in prompts)
        )
        outputs = [(prompt, ids_of(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        await asyncio.to_thread(assert_target_alone, DEMO_TARGET, *outputs)
        num_accepted = sum(answer.usage.num_accepted_tokens for answer in answers)
        assert num_accepted > 0.2 * sum(answer.usage.num_rounds for answer in answers), wish
    await asyncio.to_thread(wait_until_nothing_is_held, stack)


async def test_one_draft_serves_targets_of_several_vocabularies(
    stack: Stack, client: AsyncClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At once; each is told in its own tokens."""
    small = tiny_llama(tmp_path_factory.mktemp("small"), sharpness=3.0)
    target = Process("target_service", ["--model", small])
    assert stack.draft is not None
    try:
        beside = Stack(target, stack.draft, stack.gateway)
        with gateway_beside(beside) as gateway:
            wish = Speculation(num_draft_tokens=3)
            options: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True, "speculation": wish}
            async with AsyncClient(str(gateway.ready["grpc"])) as another:
                answers = await asyncio.gather(*(each.generate(PROMPT, **options) for each in (client, another)))
        for model, answer in zip((DEMO_TARGET, small), answers, strict=True):
            await asyncio.to_thread(assert_target_alone, model, (PROMPT, ids_of(answer)))
            assert answer.usage.num_draft_tokens > 0
        sizes = {each.vocab_size for each in (await asyncio.to_thread(stack.draft_info)).shared_vocabularies}
        assert sizes == {4096, 320}
    finally:
        target.stop()


@pytest.mark.parametrize(("target_size", "draft_size"), [(352, 320), (320, 352)])
async def test_padded_vocabularies_are_served(tmp_path: Path, target_size: int, draft_size: int) -> None:
    """The same tokenizer, but logits of ids that no token has: the target's may even be said."""
    target = tiny_llama(tmp_path / "target", target_size, sharpness=3.0)
    copy = perturbed_copy(target, tmp_path / "copy", 0.02)
    tiny_llama(tmp_path / "narrow", 320)
    for folder in (target, copy):
        _copy_tokenizer(tmp_path / "narrow", Path(folder))
    with running(target, _widened(copy, tmp_path / "sized", draft_size)) as made:
        async with AsyncClient(made.grpc) as client:
            options: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
            wish = Speculation(num_draft_tokens=3)
            answer = await client.generate("Hello", temperature=0.0, speculation=wish, **options)
            sampled = await client.generate("Hello", temperature=1.0, seed=3, speculation=wish, **options)
        assert not made.draft_info().shared_vocabularies
        assert answer.usage.num_accepted_tokens and sampled.usage.num_accepted_tokens
        await asyncio.to_thread(assert_target_alone, target, ("Hello", ids_of(answer)))


def _widened(source: str, path: Path, size: int) -> str:
    """Write a copy whose logits are of so many ids, with the same tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(size, mean_resizing=False)
    model.save_pretrained(path)
    _copy_tokenizer(Path(source), path)
    return str(path)


def _copy_tokenizer(source: Path, path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
