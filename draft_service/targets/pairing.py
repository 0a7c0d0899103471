"""Test whether a head gets the hidden states that it was trained on, at the target that it is about to serve.

One of the pairing checks that the servicer runs when the gateway pairs a draft worker with a target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import grpc.aio
import numpy as np
import torch

from draft_service.drafters.loading import HeadState
from draft_service.slot_jobs import EngineJob
from draft_service.slots.head_slot import as_tensor
from outrider.engine.heads.wiring import (
    MAX_PROBE_TAPS,
    TEXT,
    ProbeStates,
    judge,
    probe_ids,
    score_head,
    taps_to_probe,
)
from outrider.engine.kv_pool import OutOfBlocks
from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import IncompatiblePair, OutriderError, Unavailable
from outrider.wire.models.model_id import full_name, short_name
from outrider.wire.settings.config import DraftConfig
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.rpc import describe_failure

log = get_logger(__name__)

PROBE_S = 60.0
"""Maximum seconds that a target may take to reply to one probe request with hidden states."""


class WiringTest:
    """Pairing check of a head: whether the head predicts well from the target's hidden states. A passed test holds for
    the target's epoch; after a failed one, the next check tests again.
    """

    def __init__(
        self,
        state: HeadState,
        engine: EngineThread,
        metrics: WorkerMetrics,
        stub_of: Callable[[str], target_pb2_grpc.TargetServiceStub],
    ) -> None:
        """Create a test. `stub_of`: function that returns a stub for the target at an address."""
        self._stub_of = stub_of
        self._tests: dict[str, tuple[int, asyncio.Task[OutriderError | None]]] = {}
        """Epoch and running or finished test, by the target's address. A test returns the error for which the head may
        not be served; the traceback of a raised error would keep the target's replies in memory."""
        self._state = state
        self._engine = engine
        self._metrics = metrics
        self._ids = probe_ids(state.tokenizer.tokenizer_json, state.slots.context_limit, TEXT)

    async def __call__(self, address: str, target_epoch: int) -> None:
        """Test the head at a target, unless it has passed there in this epoch.

        Raises `IncompatiblePair` if the head does not fit the target, unless its configuration is trusted. Raises
        `Unavailable` if the test cannot run now.
        """
        epoch, test = self._tests.get(address, (None, None))
        if test is None or epoch != target_epoch or _has_failed(test):
            test = asyncio.create_task(self._test(address, target_epoch))
            self._tests[address] = (target_epoch, test)
        error = await asyncio.shield(test)  # a caller may stop waiting earlier, and calls again
        if error is not None:
            raise error

    async def _test(self, address: str, target_epoch: int) -> OutriderError | None:
        head = self._state.head
        taps = taps_to_probe(head.projection.spec.taps, head.num_layers)
        replies = list[tpb.ProbeReply]()
        for part in _parts(taps):
            probe = tpb.ProbeRequest(target_epoch=target_epoch, token_ids=self._ids, taps=part)
            try:
                replies.append(await self._stub_of(address).Probe(probe, timeout=PROBE_S))
            except grpc.aio.AioRpcError as error:
                return Unavailable(f"the target ran no probe: {describe_failure(error)}")
            except asyncio.CancelledError:  # calls end so when their channel is closed
                return Unavailable("the target ran no probe: its connection was closed", retry_after_s=1.0)
        try:
            outcome = await self._engine.call(EngineJob, lambda: score_head(head, seen_in(self._ids, taps, replies)))
        except OutOfBlocks as error:
            return Unavailable(f"the head cannot be tested now: {error}", retry_after_s=1.0)
        except Exception as error:
            log.exception("the test of the head failed")
            return IncompatiblePair(f"the head cannot be tested: {type(error).__name__}: {error}")
        config = self._state.config
        assert isinstance(config, DraftConfig)
        model = full_name(config.model)
        self._metrics.head_agreement.labels(draft=short_name(model)).set(outcome.configured.agreement)
        refusal = judge(outcome, model, trusts=config.trust_draft_config)
        if refusal is None:
            return None
        return IncompatiblePair(refusal)


def _has_failed(test: asyncio.Task[OutriderError | None]) -> bool:
    return test.done() and (test.cancelled() or test.exception() is not None or test.result() is not None)


def seen_in(ids: Sequence[int], taps: Sequence[int], replies: Sequence[tpb.ProbeReply]) -> ProbeStates:
    """Return the hidden states that the target computed for the probe text. Call it on the engine thread.

    `ids`: token ids of the text. `taps`: numbers of the taps that were requested. `replies`: the target's
    replies in the order of `taps`, each with the hidden states at `MAX_PROBE_TAPS` taps; the last may have fewer.
    """
    states = dict[int, torch.Tensor]()  # by tap: [len(ids), d] bfloat16
    for part, reply in zip(_parts(taps), replies, strict=True):
        bits = np.frombuffer(reply.taps, dtype=np.uint16).reshape(len(ids), len(part), -1)
        states.update(zip(part, as_tensor(bits.copy()).unbind(1), strict=True))
    return ProbeStates(ids, states, torch.tensor(list(replies[0].best_ids)))


def _parts(taps: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(taps), MAX_PROBE_TAPS):
        yield taps[first : first + MAX_PROBE_TAPS]
