"""A draft and a target worker without servers: jobs in, steps by hand, all on the calling thread.

The workers are put together by their own `start_worker`; only the engine's thread, the server and the wire between the
two are replaced by direct calls.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draft_service.targets.deliveries
import outrider.engine.worker.worker_handle as worker_handle
from draft_service.slot_jobs import AdvanceJob, FeaturesJob, FeaturesRequest
from draft_service.targets.pairing import seen_in
from draft_service.targets.registration import SerializedHead
from draft_service.worker import start_worker as start_draft
from outrider.engine.heads.projection import Projection
from outrider.engine.heads.wiring import MAX_PROBE_TAPS, WiringScores, probe_ids, score_head, taps_to_probe
from outrider.engine.speculation.beam import BeamLevel
from outrider.engine.speculation.nodes import Delivery
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, OpenJob, SlotVocabulary
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.features.features import FeatureJob, Features, FeatureSubscription
from target_service.leases.lease_jobs import ExtendJob, Verdict, VerifyJob
from target_service.worker import start_worker as start_target
from tests.tiny_models import perturbed_copy, tiny_llama

OWNER = 1
HOLD_S = 20.0
"""Seconds that a step may be held back, on a machine with much else to do."""
NUM_PROBED = 12
"""Tokens of the text by which a head's wiring is tested; the product takes 128."""


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

    def handle(self, job: Any) -> None:
        with torch.inference_mode():
            self.worker.handle(job)
        self.base.engine.flush()

    def step(self) -> bool:
        with torch.inference_mode():
            worked = self.worker.step(time.monotonic())
        self.base.engine.flush()
        return bool(worked)

    def job(self, slot: int, prompt: Sequence[int], params: SamplingParams, answers: list[Any], **more: Any) -> OpenJob:
        grammar = self.base.service.own_vocabulary.grammars.compile(params.grammar) if params.grammar else None
        ids = tuple(prompt)
        more = {"target_address": "here", "grammar": grammar, **more}
        return OpenJob(OWNER, slot, ids, len(ids), params, answers.append, **more)


@dataclass
class Slot:
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    levels: list[BeamLevel] = field(default_factory=list)
    """Of a beam search, in place of an output."""
    is_drafted: bool = True
    num_told: int = 0
    """Tokens or levels that the draft knows."""
    is_done: bool = False

    @property
    def decided(self) -> Sequence[Any]:
        return self.levels or self.output


class Pair:
    """Slots of the same number in both workers, which step as they are told."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        draft: str,
        target: str,
        *,
        of_target: dict[str, Any] | None = None,
        of_draft: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """of_target, of_draft: settings of one worker alone."""
        self.delivered: list[Delivery] = []
        self.slots: dict[int, Slot] = {}
        self._verdicts: dict[int, Any] = {}
        self._rows: list[FeaturesJob] = []
        self._head_to_add: SerializedHead | None = None
        self._digest = b""
        self._stand_in(monkeypatch)
        self.draft: Worker = start_draft(DraftConfig(model=draft, **settings, **(of_draft or {})))
        self.target: Worker = start_target(TargetConfig(model=target, **settings, **(of_target or {})))
        if self._head_to_add is not None:
            self._add_head(self._head_to_add)

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pair = self

        def start(name: str, config: Any, num_threads: int, load: Any, make: Callable[[Any], Any]) -> Worker:
            base = worker_handle._base(StoppedEngine(), config, load, WorkerMetrics(name), None, None)
            return Worker(base, make(base))

        class Deliverer:
            def __init__(self, metrics: Any, submit: Any, certificates: Any, head: SerializedHead | None) -> None:
                self.close = self.stub = self.register = None
                pair._head_to_add = head

            def send(self, address: str, target_epoch: int, nodes: Delivery) -> None:
                pair.delivered.append(nodes)

            def request_features(self, address: str, target_epoch: int, request: FeaturesRequest) -> None:
                wanted = (pair._digest, request.ticket, request.start, request.id)
                subscription = FeatureSubscription(pair, *wanted)  # type: ignore[arg-type]
                pair.target.handle(FeatureJob(lambda features: features.subscribe(subscription)))

        monkeypatch.setattr(worker_handle, "start", start)
        monkeypatch.setattr(draft_service.targets.deliveries, "Deliverer", Deliverer)

    # rows of features: the pair is the link (`FeatureStream`)

    has_capacity = True

    def _add_head(self, head: SerializedHead) -> None:
        facts = self.target.worker._runner.facts
        projection = Projection.from_bytes(head.data, facts.hidden_size, facts.num_layers)
        self.target.handle(FeatureJob(lambda features: features.add_head(head.digest, projection)))
        self._digest = head.digest

    def send_features(self, subscription: FeatureSubscription, start: int, num_tokens: int, data: bytes) -> None:
        rows = np.frombuffer(data, dtype=np.uint16).reshape(num_tokens, -1)
        self._rows.append(FeaturesJob(subscription.ticket, 0, start, rows, lambda: None, subscription.request_id))

    def count(self, fate: str, num_tokens: int, num_bytes: int) -> None:
        raise AssertionError("features were dropped")

    def test_wiring(self) -> WiringScores:
        """Return what the draft finds when it is paired with the target."""
        state, answers = self.draft.base.loaded, list[Any]()
        ids = probe_ids(state.tokenizer.tokenizer_json, state.slots.context_limit)[:NUM_PROBED]
        taps = taps_to_probe(state.head.projection.spec.taps, state.head.num_layers)

        def probe(features: Features) -> None:
            for first in range(0, len(taps), MAX_PROBE_TAPS):
                answers.append(features.probe(ids, taps[first : first + MAX_PROBE_TAPS]))

        self.target.handle(FeatureJob(probe))
        outcome: WiringScores = score_head(state.head, seen_in(ids, taps, answers))
        return outcome

    # slots

    def open(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams,
        speculation: Speculation,
        *,
        of_target: dict[str, Any] | None = None,
        vocabulary: SlotVocabulary | None = None,
        source_ids: tuple[int, ...] = (),
        is_drafted: bool = True,
    ) -> None:
        """of_target: fields of its OpenJob alone. vocabulary: of the target, where the draft has another."""
        answers: list[Any] = []
        opened = self.slots[slot] = Slot(list(prompt), params, is_drafted=is_drafted)
        if is_drafted:
            more = {"speculation": speculation, "vocabulary": vocabulary, "source_ids": source_ids}
            self.draft.handle(self.draft.job(slot, prompt, params, answers, **more))
        more = {"speculation": speculation, "source_ids": source_ids, **(of_target or {})}
        self.target.handle(self.target.job(slot, prompt, params, answers, **more))
        assert all(getattr(answer, "committed_len", None) == len(prompt) for answer in answers), answers
        num = len(opened.prompt)

        def respond(verdict: Any) -> None:
            self._verdicts[slot] = verdict

        self.target.handle(VerifyJob(OWNER, slot, num, (), [(slot, is_drafted)], num + 1, time.monotonic(), respond))

    def close_all(self) -> None:
        for slot in self.slots:
            self.draft.handle(CloseJob(OWNER, slot))
            self.target.handle(CloseJob(OWNER, slot))
        self.slots.clear()

    def round(self) -> dict[int, Verdict]:
        """Tell the draft what is committed, let it grow to its end, deliver, and take steps; the verdict of each slot
        that is not done.
        """
        self._verdicts.clear()
        running = {number: slot for number, slot in self.slots.items() if not slot.is_done}
        self.grow(running)
        for number, slot in running.items():
            length = len(slot.prompt) + len(slot.decided)
            self.target.handle(ExtendJob(OWNER, number, number, length + 1))
        for nodes in self.delivered:
            self.target.worker._leases.hand_in(nodes)
        self.delivered.clear()
        deadline_s = time.monotonic() + HOLD_S
        while len(self._verdicts) < len(running):
            if not self.target.step():  # a step may be held back for drafts
                assert time.monotonic() < deadline_s, "the target has nothing to do"
                time.sleep(0.001)
        for number, verdict in self._verdicts.items():
            assert isinstance(verdict, Verdict), verdict
            slot = self.slots[number]
            slot.output += verdict.token_ids
            slot.levels += verdict.levels
            slot.is_done = verdict.finish is not None
        return dict(self._verdicts)

    def grow(self, slots: dict[int, Slot]) -> None:
        for job in self._rows:
            self.draft.handle(job)
        self._rows.clear()
        for number, slot in slots.items():
            if slot.is_drafted:
                known, slot.num_told = slot.num_told, len(slot.decided)
                base_len, ids, levels = len(slot.prompt) + known, tuple(slot.output[known:]), tuple(slot.levels[known:])
                self.draft.handle(AdvanceJob(OWNER, number, number, base_len, ids, levels=levels))
        while self.draft.step():
            pass
