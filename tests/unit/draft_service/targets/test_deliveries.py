"""A target that does not answer in time."""

from types import SimpleNamespace
from typing import Any

import pytest

from draft_service.targets import deliveries
from draft_service.targets.deliveries import Deliverer
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import Unavailable
from outrider.wire.telemetry.metrics import WorkerMetrics
from tests.unit.draft_service.targets.registered import Peer

READY = tpb.HEAD_STATE_READY


async def test_a_head_that_the_target_does_not_answer_in_time_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "REGISTER_S", 0.01)
    deliverer, peer = Deliverer(WorkerMetrics("draft"), lambda job: None), Peer()
    link: Any = SimpleNamespace(registration=peer.registration, is_broken=False)
    deliverer._links["a:1"] = link
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"the target at a:1 did not take the head within 0\.01 s"):
            await deliverer.register("a:1", 7)
        assert peer.took() == [("head", 7, 10)]
    peer.says(READY)
    await deliverer.register("a:1", 7)
    assert not peer.took(), "it came late, and is true"
