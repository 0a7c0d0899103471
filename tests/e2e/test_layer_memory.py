"""Models of every kind of memory served by pairs of their own kind: the text is that of transformers' `generate`.

Caches are too small for what is asked at once, so that slots are preempted, and prompts begin alike, so that blocks are
shared; drafts are rejected all the time.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.client import AsyncClient, Speculation
from tests.e2e.reference import Answer, compare, judge
from tests.memory_kinds import SHAPES, config_of
from tests.stack import Stack, read_metrics, running, wait_until_nothing_is_held
from tests.tiny_models import perturbed_copy, random_model, save

VOCAB_SIZE = 320
MAX_TOKENS = 60
KV_CACHE_TOKENS = 176
"""Of the six prompts that begin alike two or three with their output."""
NOISE = 0.3
"""Of the draft's weights, relative: some of its tokens are kept."""
SHARED = "def read(self, size=-1): return self.file.read"
PROMPTS = [SHARED + text for text in ("(size)", "line()", " or None", "(1) + b", "s = [", "able()")] + [
    "import os",
    "x",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=list(SHAPES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = config_of(kind, VOCAB_SIZE, max_position_embeddings=256)
    return save(random_model(config, seed=5), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def stack(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    draft = perturbed_copy(target, tmp_path_factory.mktemp("draft"), NOISE)
    memory = ("--kv-cache-tokens", str(KV_CACHE_TOKENS))
    module = "tests.e2e.faults.paced_target"
    with running(target, draft, target_module=module, target_args=memory, draft_args=memory) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(target: str) -> list[Answer]:
    """Made by transformers in another process."""
    answers = judge(target, generate=PROMPTS, max_tokens=MAX_TOKENS).answers
    assert len({token for answer in answers for token in answer.ids}) > MAX_TOKENS  # it does not repeat itself
    return answers


@pytest.mark.parametrize("k", [0, 1, 4, 8, "auto"])
async def test_greedy_text_is_that_of_generate(
    stack: Stack, client: AsyncClient, expected: list[Answer], k: int | str
) -> None:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    wish = Speculation(num_draft_tokens=k)
    answers = await asyncio.gather(*(client.generate(text, speculation=wish, **options) for text in PROMPTS))
    for answer, wanted in zip(answers, expected, strict=True):
        difference = compare(wanted, [token.id for token in answer.choices[0].tokens])
        assert difference is None or difference.near_tie, difference
    if k not in (0, "auto"):
        assert sum(answer.usage.num_accepted_tokens for answer in answers) > 0
    wait_until_nothing_is_held(stack)
    if k == "auto":  # after all others
        metrics = read_metrics(f"http://{stack.target_info().metrics_address}/metrics")
        for name in ("preemptions_total", "prefix_hit_tokens_total"):
            assert metrics[f'outrider_worker_{name}{{worker="target"}}'] > 0, name
