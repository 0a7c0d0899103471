"""Whether a head reads the hidden states that it was trained on: asked of the target that it is about to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from draft_service.head_slot import as_tensor
from draft_service.jobs import EngineJob
from draft_service.loading import HeadState
from draft_service.target_link import Probed
from outrider.engine.heads.wiring import Outcome, Seen, taps_to_probe
from outrider.engine.worker.engine_thread import EngineThread
from outrider.wire.errors import Unavailable
from outrider.wire.log import get_logger
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.settings.config import DraftConfig

log = get_logger(__name__)

TEXT = '''def average(values):
    """Return the arithmetic mean of a list of numbers.

    An empty list has no mean, and a ValueError is raised for it.
    """
    if not values:
        raise ValueError("the list is empty")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


The first thing that a reader of a long report wants to know is what was done, why it was done, and what came of it. The
second is what it means for the work of the next few weeks.
'''
"""What heads are tested on unless a test has a text of its own: code and prose that any model has seen the like of."""
MAX_TOKENS = 128
"""Of a probe."""

Probe = Callable[[Sequence[int], Sequence[int]], Awaitable[Probed]]
"""Runs a text, by its ids and the taps wanted, at a target. Raises Unavailable."""


class WiringTest:
    """Of one head, at each target that it is paired with."""

    def __init__(self, state: HeadState, engine: EngineThread, metrics: WorkerMetrics, text: str = TEXT) -> None:
        assert isinstance(state.config, DraftConfig)
        self._state = state
        self._engine = engine
        self._metrics = metrics
        self._trusts = state.config.trust_draft_config
        self._model = state.config.model
        self._ids = Tokenizer.from_str(state.tokenizer.tokenizer_json.decode()).encode(text).ids[:MAX_TOKENS]

    async def __call__(self, probe: Probe) -> str | None:
        """Return why the head does not fit the target; None where it does, or its configuration is trusted."""
        taps = taps_to_probe(self._state.opening.spec.taps, self._state.num_layers)
        try:
            probed = await probe(self._ids, taps)
            outcome = await self._score(_seen(self._ids, taps, probed))
        except Unavailable as error:
            return error.message
        ways = ", ".join(f"{way.label} {way.agreement:.0%}" for way in (outcome.configured, *outcome.others))
        log.info("%s agrees with the target at %d positions: %s", self._model, len(outcome.configured.scores), ways)
        self._metrics.head_agreement.set(outcome.configured.agreement)
        fault = outcome.fault
        if fault is None:
            return None
        if self._trusts:
            log.warning("the head %s is served as its configuration says, as set, though %s", self._model, fault)
            return None
        return (
            f"the head {self._model} is wired in another way than it was trained: {fault}; mend its config.json, or "
            "serve it as it is with --trust-draft-config"
        )

    async def _score(self, seen: Seen) -> Outcome:
        """Raises Unavailable while there is no memory for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()

        def run() -> None:
            try:
                outcome = self._state.score(seen)
            except Exception as error:
                why = Unavailable(f"the head cannot be tested now: {error}", retry_after_s=1.0)
                self._engine.answer(lambda: done.done() or done.set_exception(why))
                return
            self._engine.answer(lambda: done.done() or done.set_result(outcome))

        self._engine.submit(EngineJob(run))
        return await done


def _seen(ids: Sequence[int], taps: Sequence[int], probed: Probed) -> Seen:
    states = as_tensor(np.ascontiguousarray(probed.taps))  # [T, taps, dt]
    found = {tap: states[:, index] for index, tap in enumerate(taps)}
    return Seen(ids, found, torch.tensor(list(probed.best_ids)))
