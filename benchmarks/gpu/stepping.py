"""A draft and a target worker in this process, without servers: jobs in, steps by hand, all on the calling thread.

For counting the waits of a step and for timing a draft's own steps. The workers are put together by their own
`start_worker`; only the engine's thread, the server and the wire between the two are replaced by direct calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

import draft_service.targets.deliveries
from draft_service.slot_jobs import AdvanceJob
from draft_service.worker import start_worker as start_draft
from outrider.engine.speculation.nodes import Delivery
from outrider.engine.worker import worker_handle
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, OpenJob
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.leases.lease_jobs import ExtendJob, VerifyJob
from target_service.worker import start_worker as start_target

OWNER = 1

Around = Callable[[], AbstractContextManager[Any]]


class StoppedEngine(EngineThread):
    """Runs nothing by itself; `flush` hands out a step's answers."""

    def __init__(self) -> None:
        super().__init__(lambda engine: None, lambda answers: [send() for send in answers])


class SteppedWorker:
    """A worker whose jobs and steps run on the caller's thread."""

    def __init__(self, base: Any, parts: Any) -> None:
        self._engine, self._worker = base.engine, parts.worker
        self.loaded: Any = base.loaded
        self.leases: Any = getattr(parts.worker, "_leases", None)
        self.around_step: Around = contextlib.nullcontext
        """Entered around each step."""

    @torch.inference_mode()
    def handle(self, job: Any) -> None:
        self._worker.handle(job)
        self._engine.flush()

    @torch.inference_mode()
    def step(self) -> bool:
        with self.around_step():
            has_worked = bool(self._worker.step(time.monotonic()))
        self._engine.flush()
        return has_worked


class SteppedPair:
    """Slots of the same number in a draft and in a target."""

    def __init__(self, draft: SteppedWorker, target: SteppedWorker, delivered: list[Delivery]) -> None:
        self.draft, self.target = draft, target
        self.committed: dict[int, list[int]] = {}
        """Tokens of each slot, its prompt's among them."""
        self._num_told: dict[int, int] = {}
        """Of these, the tokens that the draft knows."""
        self._verdicts: dict[int, Any] = {}
        self._delivered = delivered

    def open(self, prompts: Sequence[Sequence[int]], speculation: Speculation, **sampling: Any) -> None:
        """Open a slot for each prompt, and feed it. Raises RuntimeError where a worker refuses."""
        params = SamplingParams(**{"max_tokens": 512, "seed": 3, "ignore_eos": True, **sampling})
        for slot, prompt in enumerate(prompts, start=len(self.committed) + 1):
            for worker in (self.draft, self.target):
                answers: list[Any] = []
                drafted: dict[str, Any] = {"target_address": "here", "speculation": speculation}
                worker.handle(OpenJob(OWNER, slot, tuple(prompt), len(prompt), params, answers.append, **drafted))
                if getattr(answers[0], "committed_len", None) != len(prompt):
                    raise RuntimeError(f"a slot was not opened: {answers[0]}")
            self.committed[slot] = list(prompt)
            self._num_told[slot] = num = len(prompt)
            self.target.handle(
                VerifyJob(OWNER, slot, num, (), [(slot, True)], num + 1, time.monotonic(), self._responder(slot))
            )

    def close_all(self) -> None:
        for slot in self.committed:
            self.draft.handle(CloseJob(OWNER, slot))
            self.target.handle(CloseJob(OWNER, slot))
        self.committed.clear()
        self._num_told.clear()

    def _responder(self, slot: int) -> Callable[[Any], None]:
        def respond(verdict: Any) -> None:
            self._verdicts[slot] = verdict

        return respond

    def grow(self) -> None:
        """Tell the draft what is committed and let it draft until it has nothing left to do."""
        for slot, ids in self.committed.items():
            known, self._num_told[slot] = self._num_told[slot], len(ids)
            self.draft.handle(AdvanceJob(OWNER, slot, slot, known, tuple(ids[known:])))
        while self.draft.step():
            pass

    def round(self) -> None:
        """Grow, deliver, and step the target until every slot has a verdict."""
        self.grow()
        self._verdicts.clear()
        for slot, ids in self.committed.items():
            self.target.handle(ExtendJob(OWNER, slot, slot, len(ids) + 1))
        for nodes in self._delivered:
            self.target.leases.hand_in(nodes)
        self._delivered.clear()
        while len(self._verdicts) < len(self.committed):
            if not self.target.step():
                raise RuntimeError("the target has nothing to do, and slots without a verdict")
        for slot, verdict in self._verdicts.items():
            self.committed[slot] += verdict.token_ids


@contextlib.contextmanager
def stepped_pair(
    draft: str, target: str, of_draft: dict[str, Any] | None = None, **settings: Any
) -> Iterator[SteppedPair]:
    """Yield a loaded pair. of_draft: settings of the draft alone. Raises ConfigError as the workers do."""
    delivered: list[Delivery] = []

    def start(name: str, config: Any, num_threads: int, load: Any, make: Callable[[Any], Any]) -> SteppedWorker:
        base = worker_handle._base(StoppedEngine(), config, load, WorkerMetrics(name), None, None)
        return SteppedWorker(base, make(base))

    class Deliverer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.close = self.stub = self.request_features = None

        def send(self, address: str, target_epoch: int, nodes: Delivery) -> None:
            delivered.append(nodes)

    with (
        mock.patch.object(worker_handle, "start", start),
        mock.patch.object(draft_service.targets.deliveries, "Deliverer", Deliverer),
    ):
        started: Any = start_draft(DraftConfig(model=draft, **{**settings, **(of_draft or {})}))
        yield SteppedPair(started, start_target(TargetConfig(model=target, **settings)), delivered)  # type: ignore[arg-type]
