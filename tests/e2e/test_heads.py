"""A draft that is a head, while parts die, move, lose their memory or are refused: no token changes, rows and drafts
come again, and nothing is left.
"""

import asyncio
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from outrider.client import AcceptanceRule, AsyncClient, Completion, Speculation
from outrider.wire.requests.params import SamplingParams
from tests.e2e.streams import Seen, plain, speculative
from tests.e2e.test_pools import connected, member_of
from tests.random_heads import random_eagle3
from tests.samples import total
from tests.service.reference_model import ReferenceModel
from tests.stack import Pools, Process, read_metrics, running_pools, wait_until_nothing_is_held
from tests.tiny_models import tiny_llama
from tests.waiting import until

VOCAB_SIZE = 24
"""So few that drafts of a head of random weights are kept now and then."""
CONTEXT = 1024
COUPLED = {"temperature": 1.0, "ignore_eos": True}
RETURNS = re.compile("p?(sp)*s")
"""Drafts, plain rounds without them, drafts again."""
SEEDS = itertools.count(1)

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Folders:
    target: str
    head: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", VOCAB_SIZE, context=CONTEXT, sharpness=1.5)
    return Folders(target, random_eagle3(target, folder / "head", sharpness=1.0))


@pytest.fixture(scope="module")
def reference(folders: Folders) -> ReferenceModel:
    return ReferenceModel(folders.target)


@pytest.fixture(scope="module")
def pools(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Two targets that take 30 ms longer a step, so that streams outlive a restart, and a draft: short of memory."""
    cache = ("--kv-cache-tokens", str(CONTEXT))
    with running_pools(
        2,
        1,
        target=folders.target,
        draft=folders.head,
        target_args=("--batch-invariant", *cache),
        draft_args=("--target-model", folders.target, "--trust-draft-config", *cache),
        target_module="tests.e2e.faults.paced_target",
        log_folder=tmp_path_factory.mktemp("logs"),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(pools: Pools) -> Iterator[None]:
    yield
    for index, target in enumerate(pools.targets):
        wait_until_nothing_is_held(pools.stack(index))
        assert total(samples_of(target), "outrider_worker_kept_feature_bytes") == 0
    assert total(pools.metrics(), "outrider_running") == 0


@dataclass(frozen=True)
class Question:
    prompt: tuple[int, ...]
    seed: int

    @classmethod
    def new(cls, num_prompt: int = 40) -> "Question":
        seed = next(SEEDS)
        return cls(tuple(2 + (seed * i + i // 7) % (VOCAB_SIZE - 2) for i in range(1, num_prompt + 1)), seed)

    def options(self, max_tokens: int) -> dict[str, object]:
        wish = Speculation(num_draft_tokens=3, acceptance=AcceptanceRule.COUPLED)
        return {"prompt_ids": self.prompt, "seed": self.seed, "max_tokens": max_tokens, "speculation": wish, **COUPLED}

    def assert_right(self, reference: ReferenceModel, ids: Sequence[int]) -> None:
        """Each id is what the target alone says after those before it, by transformers' own forward."""
        params = SamplingParams(seed=self.seed, **COUPLED)  # type: ignore[arg-type]
        assert list(ids) == reference.next_ids(self.prompt, params, ids)


async def answer(client: AsyncClient, question: Question, max_tokens: int = 24) -> Completion:
    return await client.generate(**question.options(max_tokens))  # type: ignore[arg-type]


def ids_of(made: Completion) -> list[int]:
    return [token.id for token in made.choices[0].tokens]


def samples_of(worker: Process) -> dict[str, float]:
    return read_metrics(f"http://{worker.ready['metrics_address']}/metrics")


def num_rows(worker: Process, fate: str) -> float:
    return total(samples_of(worker), "outrider_worker_feature_rows_total", fate=fate)


async def test_a_draft_killed_in_mid_answer_reads_rows_again_and_its_head_goes_with_it(
    pools: Pools, reference: ReferenceModel
) -> None:
    question, seen = Question.new(), Seen()
    options = question.options(900)  # of which most are never heard: the client leaves
    async with AsyncClient(pools.grpc()) as client, client.stream(**options) as stream:  # type: ignore[arg-type]
        await seen.read(stream, speculative(5))
        _, target = await asyncio.to_thread(member_of, pools, "target")
        assert num_rows(target, "sent") > 0 and total(samples_of(target), "outrider_worker_head_bytes") > 0
        pools.drafts[0].kill()
        await seen.read(stream, plain(5))
        assert total(samples_of(target), "outrider_worker_head_bytes") == 0
        assert not [name for name in samples_of(target) if name.startswith("outrider_worker_feature_rows_total")]
        await asyncio.to_thread(pools.restart, pools.drafts[0])
        await seen.read(stream, speculative(10))
    assert RETURNS.fullmatch(seen.phases), seen.phases
    question.assert_right(reference, seen.ids)
    assert num_rows(pools.drafts[0], "received") > 0


async def test_rows_begin_behind_what_the_target_has_cached(
    pools: Pools, folders: Folders, reference: ReferenceModel
) -> None:
    """A draft that has the beginning, too, adopts it; one that has not begins at the first row there is."""
    question = Question.new(100)
    async with AsyncClient(pools.grpc()) as client:
        seen = list[int]()
        drafted = partial(total, draft="head")  # what a head can and what it does have the same name
        assert any('draft="head"' in name for name in samples_of(pools.drafts[0]) if "agreement" in name)
        for _ in range(4):  # it may go to the other target once
            made = await answer(client, question)
            question.assert_right(reference, ids_of(made))
            assert made.usage.num_draft_tokens > made.usage.num_rounds > 0
            seen.append(made.usage.num_cached_prompt_tokens)
        assert seen[0] == 0 and seen[-1] == 96, seen
        assert drafted(pools.metrics(), "spec_drafted_per_position_total", position="0") > 0
        await asyncio.to_thread(pools.restart, pools.drafts[0])
        await until(lambda: connected(pools.http(), "draft-0"))
        made = await answer(client, question)
        question.assert_right(reference, ids_of(made))
        assert made.usage.num_cached_prompt_tokens == 96
        assert made.usage.num_draft_tokens > made.usage.num_rounds > 0


async def test_a_head_of_wrong_wiring_is_not_used_and_everybody_is_told(
    pools: Pools, folders: Folders, reference: ReferenceModel, tmp_path: Path
) -> None:
    cache = ("--kv-cache-tokens", str(CONTEXT))
    draft = Process("draft_service", ["--model", folders.head, "--target-model", folders.target, *cache])
    targets = ",".join(target.address for target in pools.targets)
    args = ["--target", targets, "--draft", draft.address, "--port", "0", "--grpc-port", "0"]
    log = tmp_path / "gateway.log"
    try:
        gateway = await asyncio.to_thread(Process, "gateway", args, stderr_path=log)
    except BaseException:
        draft.stop()
        raise
    try:
        alone = Pools(pools.targets, [draft], [gateway])
        (why,) = read_ready(alone.http())
        assert why.startswith(f"draft at {draft.address}: draft head does not fit target target: ")
        assert "serve it as it is with trust_draft_config" in why
        await until(lambda: log.read_text().count(why.partition(": ")[2]) == 2)  # once a target
        assert "WARNING" in log.read_text()
        assert total(alone.metrics(), "outrider_members", role="draft", state="refused") == 1
        question = Question.new()
        async with AsyncClient(alone.grpc()) as client:
            made = await answer(client, question)
        question.assert_right(reference, ids_of(made))
        assert made.usage.num_draft_tokens == 0
        await asyncio.to_thread(pools.restart, pools.targets[0])  # another life may be another matter
        await until(lambda: log.read_text().count(why.partition(": ")[2]) == 3)
    finally:
        await asyncio.to_thread(gateway.stop)
        await asyncio.to_thread(draft.stop)


def read_ready(url: str) -> list[str]:
    import httpx

    said = httpx.get(f"{url}/readyz").json()
    assert said["ready"] is True
    refused: list[str] = said["refused"]
    return refused
