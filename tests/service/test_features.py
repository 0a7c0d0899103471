"""Rows of features over real gRPC, between a draft's stream and a target: those that come are those of transformers'
hidden states, whatever steps and pieces of prompts they were made in.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draft_service.slot_jobs import FeatureBits, FeaturesJob, FeaturesRequest
from draft_service.targets.deliveries import Deliverer
from draft_service.targets.registration import SerializedHead
from outrider.engine.heads.projection import Projection, ProjectionSpec
from outrider.engine.model_runner import UncachedModel
from outrider.v1 import target_pb2 as tpb
from outrider.wire.telemetry.metrics import WorkerMetrics
from tests.service.conftest import HOLD, HOLD_S, worker
from tests.service.control_client import ControlClient, deliver, delivery, new_ticket, verify
from tests.service.reference_model import ReferenceModel
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB, HIDDEN, LAYERS, WIDTH = 320, 32, 2, 8
TAPS = (0, 2, 1)
PIECE, BLOCKS = 16, 9
PROMPT = tuple(2 + (7 * i) % 300 for i in range(50))
K = 3
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def target_worker(target_folder: str) -> Iterator[Process]:
    """It feeds prompts in pieces of 16, and its cache has room for one long answer and a half."""
    memory = ("--max-prefill-tokens", str(PIECE), "--kv-cache-tokens", str(16 * BLOCKS))
    with worker("target_service", target_folder, "--max-slots", "4", *memory, f"@{HOLD}={HOLD_S}") as process:
        yield process


@pytest.fixture(scope="module")
def model(target_folder: str) -> UncachedModel:
    return UncachedModel(AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval())


def projection(taps: Sequence[int] = TAPS, hidden: int = HIDDEN, seed: int = 0) -> Projection:
    spec, generator = ProjectionSpec(tuple(taps), WIDTH, "each"), torch.Generator().manual_seed(seed)
    return Projection(spec, {name: torch.randn(of, generator=generator) for name, of in spec.shapes(hidden).items()})


def numbers(rows: FeatureBits) -> Tensor:
    return torch.from_numpy(rows.view(np.int16).copy()).view(torch.bfloat16).float()


class Draft:
    """A draft's stream to a target, and what came on it."""

    def __init__(self, client: ControlClient, process: Process, made: Projection) -> None:
        self.client = client
        self.address = process.address
        self.projection = made
        self.rows: dict[tuple[int, int], FeatureBits] = {}
        """By ticket and position, the last that came."""
        self.num_rows = 0
        self.deliverer = Deliverer(WorkerMetrics("draft"), self._take, head=SerializedHead.of(made))
        self._changed = asyncio.Event()

    def _take(self, job: FeaturesJob) -> None:
        assert job.target_epoch == self.client.epoch
        job.on_stored()
        self.num_rows += len(job.rows)
        for position, row in enumerate(job.rows, job.start):
            self.rows[job.ticket, position] = row
        self._changed.set()

    def request(self, ticket: int, start: int = 0) -> None:
        self.deliverer.request_features(self.address, self.client.epoch, FeaturesRequest(ticket, start, 1))

    async def pair(self) -> None:
        await self.deliverer.register(self.address, self.client.epoch)

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not check():
                self._changed.clear()
                await self._changed.wait()

    async def came(self, ticket: int, start: int, end: int) -> Tensor:
        """Return the rows of these positions, [end - start, WIDTH], once the last is here, and all of them are."""
        await self.until(lambda: (ticket, end - 1) in self.rows)
        return numbers(np.stack([self.rows[ticket, position] for position in range(start, end)]))

    def expected(self, model: UncachedModel, ids: Sequence[int]) -> Tensor:
        """[T, WIDTH] of a text, by transformers."""
        return self.projection(model.hidden_states(ids)[:, list(self.projection.spec.taps)]).float()


@asynccontextmanager
async def draft_of(client: ControlClient, process: Process, made: Projection | None = None) -> AsyncIterator[Draft]:
    draft = Draft(client, process, projection() if made is None else made)
    yield draft
    await draft.deliverer.close()


def check_close(found: Tensor, expected: Tensor) -> None:
    """Within what rounding to bfloat16 leaves; rows of other positions are far from that."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    others = (expected[1:] - expected[:-1]).abs().amax(dim=-1)
    assert others.min() > 0.2


async def test_rows_are_those_of_the_tokens_in_pieces_of_prompts_and_in_steps(
    target: ControlClient, target_worker: Process, model: UncachedModel, reference: ReferenceModel
) -> None:
    """Asked for before the lease begins, whose first step feeds the prompt and is not held; of the next step two drafts
    are kept and the third refused.
    """
    async with draft_of(target, target_worker) as draft:
        ticket, expected = new_ticket(), reference.greedy(PROMPT, 2 * K)
        draft.request(ticket)
        await draft.pair()  # which waits for the registration that the request began
        draft.request(ticket)
        await target.opened(1, PROMPT, k=K)
        replies = target.follow(verify(1, len(PROMPT), ticket=ticket, num_steps=K + 2))
        (plain,) = await replies.verdicts(1)
        committed = [*PROMPT, *plain.token_ids]
        drafts = [*expected[1:K], (expected[K] + 1) % VOCAB]
        await deliver(target, delivery(target, ticket, len(committed), drafts))
        (first,) = await replies.verdicts(1)
        assert (plain.num_drafted, first.num_drafted, first.num_accepted) == (0, K, K - 1)
        committed += first.token_ids
        truth = draft.expected(model, committed)
        check_close(await draft.came(ticket, 0, len(committed) - 1), truth[:-1])
        assert (ticket, len(committed) - 1) not in draft.rows, "the refused one and the last have none"
        assert draft.num_rows == len(committed) - 1
        (second,) = await replies.verdicts(1)
        committed += second.token_ids
        check_close(
            await draft.came(ticket, 0, len(committed) - 1), draft.expected(model, committed)[: len(committed) - 1]
        )


async def test_a_probe_says_what_the_target_says(
    target: ControlClient, target_worker: Process, model: UncachedModel
) -> None:
    async with draft_of(target, target_worker) as draft:
        taps = (-1, 0, LAYERS)
        stub = draft.deliverer.stub(draft.address)
        probe = tpb.ProbeRequest(target_epoch=target.epoch, token_ids=PROMPT, taps=taps)
        probed = await stub.Probe(probe, timeout=TIMEOUT_S)
        states = model.hidden_states(PROMPT)
        truth = torch.stack([states[:, tap] for tap in taps], dim=1)
        rows = np.frombuffer(probed.taps, dtype=np.uint16).reshape(len(PROMPT), len(taps), -1)
        torch.testing.assert_close(numbers(rows), truth, rtol=0.01, atol=0.01)
        assert list(probed.best_ids) == model.forward(PROMPT).argmax(dim=-1).tolist()
        probe.taps[0] = 9
        with pytest.raises(grpc.aio.AioRpcError, match=r"taps \[9, 0, 2\], 3 in all; the target has 2 layers"):
            await stub.Probe(probe, timeout=TIMEOUT_S)
