"""Tests whether a head reads the hidden states that it was trained on, at the target that it is about to serve."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

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
from outrider.wire.errors import Unavailable
from outrider.wire.log import get_logger
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.model_id import full_name, short_name
from outrider.wire.settings.config import DraftConfig

log = get_logger(__name__)

Probe = Callable[[str, int, Sequence[int], Sequence[int]], Awaitable[Probed]]
"""Runs the target at (address, epoch) over (token ids, taps). Raises Unavailable."""


class WiringTest:
    """Tests one head at each life of a target that it is paired with: once, where it fits."""

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

        Raises Unavailable while that cannot be known.
        """
        epoch, test = self._tests.get(address, (None, None))
        if test is None or epoch != target_epoch or (test.done() and not _fits(test)):
            test = asyncio.create_task(self._test(address, target_epoch))
            self._tests[address] = (target_epoch, test)
        return await asyncio.shield(test)  # a caller may not wait that long, and calls again

    def forget(self, address: str) -> None:
        """Forget a target that nothing is delivered to any more."""
        self._tests.pop(address, None)

    async def _test(self, address: str, target_epoch: int) -> str | None:
        taps = taps_to_probe(self._state.head.opening.spec.taps, self._state.head.num_layers)
        probed = list[Probed]()
        for first in range(0, len(taps), MAX_PROBE_TAPS):
            part = taps[first : first + MAX_PROBE_TAPS]
            probed.append(await self._probe(address, target_epoch, self._ids, part))
        scoring = concurrent.futures.Future[Outcome]()
        self._engine.submit(EngineJob(partial(self._score, _seen(self._ids, taps, probed), scoring)))
        try:
            outcome = await asyncio.wrap_future(scoring)
        except OutOfBlocks as error:
            raise Unavailable(f"the head cannot be tested now: {error}", retry_after_s=1.0) from None
        except Exception as error:
            log.error("the test of the head failed", exc_info=error)
            return f"the head cannot be tested: {type(error).__name__}: {error}"
        self._metrics.head_agreement.labels(draft=short_name(self._model)).set(outcome.configured.agreement)
        return judge(outcome, self._model, trusts=self._trusts)

    def _score(self, seen: Seen, scoring: concurrent.futures.Future[Outcome]) -> None:
        """Run the head. On the engine thread."""
        try:
            scoring.set_result(score_head(self._state.head, seen))
        except Exception as error:
            scoring.set_exception(error)


def _fits(test: asyncio.Task[str | None]) -> bool:
    """Return whether a test that is over found that the head fits."""
    return not test.cancelled() and test.exception() is None and test.result() is None


def _seen(ids: Sequence[int], taps: Sequence[int], probed: Sequence[Probed]) -> Seen:
    states = as_tensor(np.concatenate([part.taps for part in probed], axis=1))  # [T, taps, dt]
    found = {tap: states[:, index] for index, tap in enumerate(taps)}
    return Seen(ids, found, torch.tensor(list(probed[0].best_ids)))
