"""When a head is tested at a target: once in each life of one that it fits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from draft_service import pairing as module
from draft_service.jobs import EngineJob
from draft_service.pairing import WiringTest
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.settings.config import DraftConfig


class AtOnce:
    """An engine that does what it is given."""

    def submit(self, job: EngineJob) -> None:
        job.run()

    def answer(self, send: Callable[[], None]) -> None:
        send()


async def test_a_head_is_tested_once_in_each_life_of_a_target_that_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    said, asked = {("b:1", 7): "it reads a layer too low"}, list[tuple[str, int]]()
    monkeypatch.setattr(module, "probe_ids", lambda *_: [1, 2])
    monkeypatch.setattr(module, "_seen", lambda ids, taps, probed: probed)
    monkeypatch.setattr(module, "judge", lambda *_, **__: said.get(asked[-1]))
    state: Any = SimpleNamespace(
        config=DraftConfig.model_construct(model="head", trust_draft_config=False),
        tokenizer=SimpleNamespace(tokenizer_json=b""),
        slots=SimpleNamespace(context_limit=9),
        opening=SimpleNamespace(spec=SimpleNamespace(taps=(1,))),
        num_layers=2,
        score=lambda seen: SimpleNamespace(configured=SimpleNamespace(agreement=0.5)),
    )

    async def probe(address: str, epoch: int, ids: Any, taps: Any) -> Any:
        asked.append((address, epoch))

    engine: Any = AtOnce()
    test = WiringTest(state, engine, WorkerMetrics("draft"), probe)
    lives = [("a:1", 7), ("b:1", 7), ("a:1", 8), ("a:1", 7)]
    for address, epoch in lives:
        why = said.get((address, epoch))
        assert [await test(address, epoch), await test(address, epoch)] == [why, why]
    assert asked == [("a:1", 7), ("b:1", 7), ("b:1", 7), ("a:1", 8), ("a:1", 7)]
