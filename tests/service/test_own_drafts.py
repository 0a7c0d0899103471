"""The target's own drafters over real gRPC: followers are what is committed."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from outrider.v1 import common_pb2 as pb
from tests.service.conftest import stream_to, worker
from tests.service.control_client import ControlClient, open_slot, verify
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31, 12, 7, 99, 5, 12, 7)


@pytest.fixture(scope="module")
def drafting_worker(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log, " * 3)
    with worker("target_service", target_folder, "--max-slots", "8", "--drafter-text", str(text)) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def target(drafting_worker: Process) -> AsyncIterator[ControlClient]:
    async with stream_to(drafting_worker, "target") as client:
        yield client


def open_with(drafter: str | None, slot: int, ids: Sequence[int], k: int = 4, **options: Any) -> pb.OpenSlot:
    """k: draft tokens of each step, which are verified whatever they cost."""
    message = open_slot(slot, ids, k=k, **{"max_tokens": 40, **options})
    message.corpus_id = b"of these tests"
    if drafter is not None:
        message.drafter = drafter
    return message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "lookup", "bigram"])
async def test_a_follower_is_what_is_committed_whatever_came_before(
    target: ControlClient, drafter: str, temperature: float
) -> None:
    """Cut back, sent again and anew, a slot drafts and decides as one that was opened for these tokens."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 5}
    await target.ask(open_with(drafter, 1, PROMPT, **options))
    first = await target.ask(verify(1, len(PROMPT)))
    ids = [*PROMPT, *first.token_ids]
    second = await target.ask(verify(1, len(ids)))
    again = await target.ask(verify(1, len(ids)))  # the verdict was lost: the gateway asks from where it was
    assert list(again.token_ids) == list(second.token_ids) and again.num_drafted == second.num_drafted
    other = [*ids[:-1], 12, 7, 99]  # and a stop string cut the text
    cut = await target.ask(verify(1, len(ids) - 1, [12, 7, 99]))
    await target.ask(open_with(drafter, 2, other[: len(PROMPT)], **options))
    fresh = await target.ask(verify(2, len(PROMPT), other[len(PROMPT) :]))
    assert (cut.num_drafted, cut.num_accepted, list(cut.token_ids)) == (
        fresh.num_drafted,
        fresh.num_accepted,
        list(fresh.token_ids),
    )
    for slot in (1, 2):
        target.tell(pb.CloseSlot(slot=slot))
