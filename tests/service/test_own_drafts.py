"""The target's own drafters over real gRPC: the text is the target's, followers are what is committed, none leaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from tests.random_heads import random_lookahead
from tests.service.conftest import stream_to, worker
from tests.service.control_client import ControlClient, open_slot, verify
from tests.service.reference_model import ReferenceModel
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31, 12, 7, 99, 5, 12, 7)
PLAIN, ACCEPTED = pb.TOKEN_KIND_PLAIN, pb.TOKEN_KIND_ACCEPTED


@pytest.fixture(scope="module")
def drafting_worker(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log, " * 3)
    embeddings = random_lookahead(target_folder, tmp_path_factory.mktemp("pass"))
    settings = ("--drafter-text", str(text), "--lookahead-embeddings", embeddings)
    with worker("target_service", target_folder, "--max-slots", "8", *settings) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def target(drafting_worker: Process) -> AsyncIterator[ControlClient]:
    async with stream_to(drafting_worker, "target") as client:
        yield client


def open_with(
    drafter: str | None, slot: int, ids: Sequence[int], k: int = 4, prediction: Sequence[int] = (), **options: Any
) -> pb.OpenSlot:
    """k: draft tokens of each step, which are verified whatever they cost."""
    message = open_slot(slot, ids, k=k, **{"max_tokens": 40, **options})
    message.prediction_ids.extend(prediction)
    message.corpus_id = b"of these tests"
    if drafter is not None:
        message.drafter = drafter
    return message


async def answer(
    target: ControlClient, drafter: str | None, slot: int = 1, num: int = 30, k: int = 4, **options: Any
) -> tuple[list[int], list[tpb.Verdict]]:
    """Output, of at least `num` tokens, and its verdicts."""
    assert isinstance(await target.ask(open_with(drafter, slot, PROMPT, k, **options)), pb.OpenReply)
    ids, verdicts = list(PROMPT), list[tpb.Verdict]()
    while len(ids) < len(PROMPT) + num:
        verdicts.append(await target.ask(verify(slot, len(ids))))
        assert isinstance(verdicts[-1], tpb.Verdict), verdicts[-1]
        assert verdicts[-1].committed_len == len(ids)
        ids += verdicts[-1].token_ids
    target.tell(pb.CloseSlot(slot=slot))
    return ids[len(PROMPT) :], verdicts


async def refused(target: ControlClient, message: pb.OpenSlot | tpb.Verify) -> str:
    error = await target.ask(message)
    assert isinstance(error, pb.WorkerError) and error.code == pb.WORKER_ERROR_CODE_INVALID, error
    return error.message


@pytest.mark.parametrize("drafter", [None, "unigram"])
async def test_a_predicted_text_is_copied_and_another_drafts_where_it_is_left(
    target: ControlClient, reference: ReferenceModel, drafter: str | None
) -> None:
    """Of what the target says ten tokens are cut out of the prediction, and others put in."""
    expected = reference.greedy(PROMPT, 40)
    prediction = [*expected[:8], *expected[18:28], 3, 3, *expected[28:]]
    ids, verdicts = await answer(target, drafter, num=40, prediction=prediction)
    assert ids == expected
    num_predicted, alike = sum(verdict.num_predicted for verdict in verdicts), len(prediction) - 2
    assert alike - 3 * 2 <= num_predicted <= alike
    assert len(verdicts) < 40 - num_predicted / 2
    who = {verdict.drafter for verdict in verdicts if verdict.num_drafted}
    assert "prediction" in who and (drafter is None or drafter in who)


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


async def test_lookup_copies_what_an_ended_answer_said_under_the_same_corpus_id_alone(target: ControlClient) -> None:
    prompt = [200, 201, 202]

    async def drafted(corpus_id: bytes, **options: Any) -> int:
        message = open_with("lookup", 1, prompt, **options)
        message.corpus_id = corpus_id
        await target.ask(message)
        num, ids = 0, list(prompt)
        while len(ids) < len(prompt) + 12:
            verdict = await target.ask(verify(1, len(ids)))
            num, ids = num + verdict.num_drafted, [*ids, *verdict.token_ids]
        target.tell(pb.CloseSlot(slot=1))
        return num

    first = await drafted(b"one")
    assert await drafted(b"other") == first
    assert await drafted(b"one") > first
    assert await drafted(b"") == await drafted(b"") == first
    message = open_with("lookup", 1, prompt)
    message.corpus_id = bytes(33)
    assert "bytes of corpus_id is 33, must be from 0 to 32" in await refused(target, message)
