"""A draft and a target worker without servers: jobs in, steps by hand, all on the calling thread.

The workers are put together by their own `start_worker`; only the engine's thread, the server and the wire between the
two are replaced by direct calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import draft_service.deliveries
import outrider.engine.worker.worker_handle as worker_handle
import target_service.tickets
from draft_service.jobs import PartOut, ProposeJob
from draft_service.worker import start_worker as start_draft
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import OpenJob
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.tree_shape import TreeShape
from target_service.jobs import VerifyJob
from target_service.tickets import DeliveryPart
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

    def flush(self) -> None:
        self._flush()


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
    """slots of the same number in both workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft: str, target: str, **settings: Any) -> None:
        self.parts: list[PartOut] = []
        self.parents: list[tuple[int, ...]] = []
        """Of what was delivered in the last round; () of a chain."""
        self.tickets: Any = None
        self._numbers = itertools.count(1)
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
                self.close = None

            def send(self, part: PartOut) -> None:
                pair.parts.append(part)

        class TicketTable(target_service.tickets.TicketTable):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                pair.tickets = self

        monkeypatch.setattr(worker_handle, "start", start)
        monkeypatch.setattr(draft_service.deliveries, "Deliverer", Deliverer)
        monkeypatch.setattr(target_service.tickets, "TicketTable", TicketTable)

    def open(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> None:
        for worker in (self.draft, self.target):
            answers: list[Any] = []
            worker.handle(OpenJob(OWNER, slot, tuple(prompt), len(prompt), params, answers.append, deliver_to="here"))
            assert answers and getattr(answers[0], "committed_len", None) == len(prompt), answers

    def round(
        self,
        slots: dict[int, Sequence[int]],
        k: int,
        encoding: DraftLogprobs = DraftLogprobs.AUTO,
        tree: TreeShape | None = None,
    ) -> list[Any]:
        """Propose, deliver, verify; the verdicts in order. slots: committed ids of each; k: most nodes of a tree."""
        now, tickets = time.monotonic(), {slot: next(self._numbers) for slot in slots}
        proposed: list[Any] = []
        verdicts: list[Any] = []
        for slot, ids in slots.items():
            job = ProposeJob(OWNER, slot, 0, tuple(ids), k, tickets[slot], encoding, 8, now, proposed.append, tree)
            self.draft.handle(job)
        while len(proposed) < len(slots):
            assert self.draft.step()
        self.parents = [part.parents for part in self.parts]
        for part in self.parts:
            fields = ("ticket", "committed_len", "start", "draft_ids", "rows", "num_draft_tokens", "parents")
            part_in = DeliveryPart(**{name: getattr(part, name) for name in fields}, num_bytes=0)
            self.tickets.deliver(part_in, time.monotonic())
        self.parts.clear()
        for slot, ids in slots.items():
            job = VerifyJob(OWNER, slot, 0, tuple(ids), k, tickets[slot], 60.0, now, verdicts.append)
            self.target.handle(job)
        while len(verdicts) < len(slots):
            assert self.target.step()
        return verdicts
