"""A draft and a target worker without servers: jobs in, steps by hand, all on the calling thread.

The workers are put together by their own `start_worker`; only the engine's thread, the server and the wire between the
two are replaced by direct calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import draft_service.deliveries
import outrider.engine.worker.worker_handle as worker_handle
from draft_service.jobs import AdvanceJob
from draft_service.worker import start_worker as start_draft
from outrider.engine.speculation.nodes import Nodes
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import OpenJob
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.speculation import Speculation
from target_service.jobs import ExtendJob, VerifyJob
from target_service.worker import start_worker as start_target
from tests.tiny_models import perturbed_copy, tiny_llama

OWNER = 1


def tiny_pair(folder: Path) -> tuple[str, str]:
    """Folders of a draft and of its target."""
    target = tiny_llama(folder / "target", sharpness=3.0)
    return perturbed_copy(target, folder / "draft", 0.2), target


class StoppedEngine(EngineThread):
    """Runs nothing by itself; `flush` hands out a step's answers."""

    def __init__(self) -> None:
        super().__init__(lambda engine: None, lambda answers: [send() for send in answers])


class Worker:
    def __init__(self, base: Any, parts: Any) -> None:
        self.base, self.worker = base, parts.worker
        self.around_step: Callable[[], Any] | None = None

    def handle(self, job: Any) -> None:
        with torch.inference_mode():
            self.worker.handle(job)
        self.base.engine.flush()

    def step(self) -> bool:
        with torch.inference_mode():
            if self.around_step is None:
                worked = self.worker.step(time.monotonic())
            else:
                with self.around_step():
                    worked = self.worker.step(time.monotonic())
        self.base.engine.flush()
        return bool(worked)


class Pair:
    """Slots of the same number in both workers, which step as they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft: str, target: str, **settings: Any) -> None:
        self.delivered: list[Nodes] = []
        self._known: dict[int, int] = {}
        self._verdicts: list[Any] = []
        self._stand_in(monkeypatch)
        self.draft: Worker = start_draft(DraftConfig(model=draft, **settings))
        self.target: Worker = start_target(TargetConfig(model=target, **settings))

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pair = self

        def start(name: str, config: Any, num_threads: int, load: Any, make: Callable[[Any], Any]) -> Worker:
            base = worker_handle._base(StoppedEngine(), config, load, WorkerMetrics(name), None, None)
            return Worker(base, make(base))

        class Deliverer:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.close = self.facts = None

            def send(self, address: str, target_epoch: int, nodes: Nodes) -> None:
                pair.delivered.append(nodes)

        monkeypatch.setattr(worker_handle, "start", start)
        monkeypatch.setattr(draft_service.deliveries, "Deliverer", Deliverer)

    def open(self, slot: int, prompt: Sequence[int], params: SamplingParams, speculation: Speculation) -> None:
        for worker in (self.draft, self.target):
            answers: list[Any] = []
            rest: dict[str, Any] = {"deliver_to": "here", "speculation": speculation}
            worker.handle(OpenJob(OWNER, slot, tuple(prompt), len(prompt), params, answers.append, **rest))
            assert answers and getattr(answers[0], "committed_len", None) == len(prompt), answers
        self._known[slot] = num = len(prompt)
        respond = self._verdicts.append
        self.target.handle(VerifyJob(OWNER, slot, num, (), slot, num + 1, True, time.monotonic(), respond))

    def round(self, slots: dict[int, Sequence[int]]) -> list[Any]:
        """Tell the draft what is committed, let it grow to its end, deliver, and take a step; the verdicts in order."""
        self._verdicts.clear()
        for slot, ids in slots.items():
            known = self._known[slot]
            self.draft.handle(AdvanceJob(OWNER, slot, slot, known, tuple(ids[known:])))
            self._known[slot] = len(ids)
        while self.draft.step():
            pass
        for slot, ids in slots.items():
            self.target.handle(ExtendJob(OWNER, slot, slot, len(ids) + 1))
        for nodes in self.delivered:
            self.target.worker._leases.hand_in(nodes)
        self.delivered.clear()
        while len(self._verdicts) < len(slots):
            assert self.target.step()
        return list(self._verdicts)
