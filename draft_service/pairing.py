"""Whether a head reads the hidden states that it was trained on: asked of the target that it is about to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from draft_service.head_slot import as_tensor
from draft_service.jobs import EngineJob
from draft_service.loading import HeadState
from draft_service.target_link import Probed
from outrider.engine.heads.wiring import (
    MAX_PROBE_TAPS,
    TEXT,
    Outcome,
    Seen,
    judge,
    probe_ids,
    score_head,
    taps_to_probe,
)
from outrider.engine.kv_pool import OutOfBlocks
from outrider.engine.worker.engine_thread import EngineThread
from outrider.wire.errors import OutriderError, Unavailable, WorkerFault
from outrider.wire.log import get_logger
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.model_id import full_name, short_name
from outrider.wire.settings.config import DraftConfig

log = get_logger(__name__)

Probe = Callable[[str, int, Sequence[int], Sequence[int]], Awaitable[Probed]]
"""Runs a text at (a target's address, its epoch), by its ids and the taps wanted. Raises Unavailable."""


class WiringTest:
    """Of one head, at each life of a target that it is paired with: once, where it fits."""

    def __init__(
        self, state: HeadState, engine: EngineThread, metrics: WorkerMetrics, probe: Probe, text: str = TEXT
    ) -> None:
        assert isinstance(state.config, DraftConfig)
        self._probe = probe
        self._tests: dict[str, tuple[int, asyncio.Task[str | None]]] = {}
        """By address: the target's epoch, and why the head does not fit it."""
        self._state = state
        self._engine = engine
        self._metrics = metrics
        self._trusts = state.config.trust_draft_config
        self._model = full_name(state.config.model)
        self._ids = probe_ids(state.tokenizer.tokenizer_json, state.slots.context_limit, text)

    async def __call__(self, address: str, target_epoch: int) -> str | None:
        """Return why the head does not fit the target; None where it does, or its configuration is trusted.

        Raises Unavailable while that cannot be told.
        """
        epoch, test = self._tests.get(address, (None, None))
        if test is None or epoch != target_epoch or (test.done() and not _fits(test)):
            test = asyncio.create_task(self._test(address, target_epoch, test))
            self._tests[address] = (target_epoch, test)
        return await asyncio.shield(test)  # who asked may not wait that long, and asks again

    def forget(self, address: str) -> None:
        """Forget a target that nothing is delivered to any more."""
        self._tests.pop(address, None)

    async def _test(self, address: str, target_epoch: int, before: asyncio.Task[str | None] | None) -> str | None:
        """before: the test before this one, which ends first: a target runs one probe of a stream at a time."""
        if before is not None:
            await asyncio.wait([before])
        head = self._state.head
        taps = taps_to_probe(head.opening.spec.taps, head.num_layers)
        parts = [taps[first : first + MAX_PROBE_TAPS] for first in range(0, len(taps), MAX_PROBE_TAPS)]
        probed = [await self._probe(address, target_epoch, self._ids, part) for part in parts]
        try:
            outcome = await self._score(_seen(self._ids, taps, probed))
        except WorkerFault as error:
            return error.message
        self._metrics.head_agreement.labels(draft=short_name(self._model)).set(outcome.configured.agreement)
        return judge(outcome, self._model, trusts=self._trusts)

    async def _score(self, seen: Seen) -> Outcome:
        """Raises Unavailable while there is no memory for it, WorkerFault where it fails."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()

        def run() -> None:
            try:
                outcome = score_head(self._state.head, seen)
            except Exception as error:
                why = _failure(error)
                self._engine.answer(lambda: done.done() or done.set_exception(why))
                return
            self._engine.answer(lambda: done.done() or done.set_result(outcome))

        self._engine.submit(EngineJob(run))
        return await done


def _fits(test: asyncio.Task[str | None]) -> bool:
    """Return whether a test that is over found that the head fits."""
    return not test.cancelled() and test.exception() is None and test.result() is None


def _failure(error: Exception) -> OutriderError:
    if isinstance(error, OutOfBlocks):
        return Unavailable(f"the head cannot be tested now: {error}", retry_after_s=1.0)
    log.error("the test of the head failed", exc_info=error)
    return WorkerFault(f"the head cannot be tested: {type(error).__name__}: {error}")


def _seen(ids: Sequence[int], taps: Sequence[int], probed: Sequence[Probed]) -> Seen:
    states = as_tensor(np.concatenate([each.taps for each in probed], axis=1))  # [T, taps, dt]
    found = {tap: states[:, index] for index, tap in enumerate(taps)}
    return Seen(ids, found, torch.tensor(list(probed[0].best_ids)))
